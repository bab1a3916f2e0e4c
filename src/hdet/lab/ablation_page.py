"""What an ablation tells, and its page: Table 1 and figures 1, 2 and 3 of the paper, of runs of one's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hdet
from hdet.lab.ablation import EQUAL, FULL, Result, Training, mean_text, metric_names
from hdet.lab.intervals import compare
from hdet.lab.page.chart import Chart
from hdet.lab.page.html_page import (
    Cell,
    PageCharts,
    Section,
    body_html,
    build_page,
    results_html,
    sections_html,
    sentence_html,
)
from hdet.lab.page.paper_figures import Curve, cycle_charts, schedule_charts, training_chart
from hdet.lab.page.read_runs import Run

TITLE = "Scalable Hyperparameter-Divergent Ensemble Training (Cheng et al., 2026)"
_IN_FIGURE_2 = ("plain", "grid", "warm_init_checkpoint", "hdet_no_warm_start", FULL)
_NUM_POINTS = 100


def headline(results: Sequence[Result]) -> tuple[str, str]:
    """Say whether the paper's headline held here, and by what; empty if its rows were not run."""
    low, high, full = (next(r for r in results if r.row.key == key) for key in ("plain", "grid", FULL))
    if not (low.runs and high.runs and full.runs):
        return "", ""
    signs = [compare(full.outcomes, other.outcomes)[0] for other in (high, low)]
    word = "holds" if min(signs) > 0 else "does not hold" if min(signs) < 0 else "cannot be told"
    said = f"“HDET trains where plain training breaks, and ends below {low.row.name}” {word} here."
    crashes = [sum(run.is_crash for run in result.runs) for result in (high, full)]
    counts = [
        f"{num} of {len(r.runs)} runs of “{r.row.name}”" for num, r in zip(crashes, (high, full), strict=True)
    ]
    ends = f"“{full.row.name}” ends at {full.loss_text}, “{low.row.name}” at {low.loss_text}."
    return said, f"At a learning rate of {high.lr:g}, {' and '.join(counts)} crashed. {ends}"


def remarks(results: Sequence[Result], task: str) -> list[str]:
    """Say what marks mean and what crashes and losses tell by tests; nothing about rows not run."""
    said = [
        "† marks a crash: a loss that is not finite, a final one above the untrained model's, a jump of the "
        "training loss that the run did not recover from, or less than half of what Baseline-Low learned. "
        "The paper's losses are training losses on its own data, not comparable. A checkpoint is a plain run "
        "of the same length, at a ninth of the learning rate."
    ]
    runs = [run for result in results for run in result.runs]
    if runs and not any(run.is_crash for run in runs):
        said.append(
            f"On {task} no run of this table crashed, so nothing here shows whether the method keeps a run "
            "from breaking."
        )
    full, *others = (next(r for r in results if r.row.key == key) for key in (FULL, "grid", EQUAL))
    dues = ("checkpoint, decay, spread and the replicas' losses", "spread and the replicas' losses")
    for other, due in zip(others, dues, strict=True):
        if full.runs and other.runs:
            sign, why = compare(full.outcomes, other.outcomes)
            words = {1: "does better than", 0: "cannot be told from", -1: "does worse than"}[sign]
            said.append(f"“{full.row.name}” {words} “{other.row.name}”: {why}. They differ by {due}.")
    return said


def build_ablation(results: Sequence[Result], base: Mapping[str, Any], out: str | Path) -> Path:
    """Write the self-contained page of an ablation, and return its path.

    Args:
        results: the rows, with the runs that there are.
        base: the settings that all rows share.
        out: the file.

    Raises:
        HdetError: plotly, which draws the charts, is not installed.
    """
    return build_page(
        out,
        title=f"{TITLE} - hdet",
        footer=f"Written by hdet {hdet.__version__}. The page is one file and loads nothing from elsewhere.",
        body=lambda charts: _body(results, base, charts),
    )


def _body(results: Sequence[Result], base: Mapping[str, Any], charts: PageCharts) -> str:
    said = (
        f"Its Table 1 and figures 1 to 3, of runs here: {base['task']}, {base['steps']} steps, "
        f"{base['replicas']} replicas, {base['optimizer']}. The train loss is the mean of the last tenth of "
        "the steps, the held-out loss is taken after the last one."
    )
    names = metric_names(results)
    rows = [
        [
            Cell(result.row.name, result.row.name),
            Cell(f"{result.lr:.3g}", result.lr),
            Cell(mean_text([run.end_loss for run in result.runs]) or "-", ""),
            Cell(result.loss_text, result.loss_text),
            *(Cell(result.metric_text(name), result.metric_text(name)) for name in names),
            Cell(result.row.paper or "-", result.row.paper),
            Cell(result.row.description, result.row.description),
        ]
        for result in results
    ]
    heads = ["model", "LR", "train loss", "held-out loss", *map(str.upper, names), "paper", "description"]
    table = results_html(heads, rows, label="Table 1")
    table += "".join(sentence_html(remark, "common") for remark in remarks(results, base["task"]))
    sections = [Section("Table 1", before=table), Section("Figures 1, 2 and 3", _charts(results))]
    main = sections_html(sections, charts, level=2, num_steps=base["steps"])
    verdict, why = headline(results)
    introduction = sentence_html(verdict, "headline") + sentence_html(f"{why} {said}", "sentence")
    return body_html(TITLE, introduction, main)


def _charts(results: Sequence[Result]) -> Iterator[Chart]:
    """Figures 1 and 3 of HDET (full), and figure 2 of the rows that it has, of the first seed."""
    done = {result.row.key: result for result in results if result.runs}
    full = Run(path=Path(), name="", records=done[FULL].runs[0].records) if FULL in done else None
    if full is not None:
        yield from cycle_charts(full)
    shown = [done[key] for key in _IN_FIGURE_2 if key in done]
    chart = training_chart([_curve(result.row.name, result.runs[0]) for result in shown])
    chart.caption += " Of the first seed. Points are means over a hundredth of the run."
    yield chart
    if full is not None:
        yield from schedule_charts(full)


def _curve(name: str, run: Training) -> Curve:
    block = max(1, -(-len(run.losses) // _NUM_POINTS))
    ends = range(block, len(run.losses) + 1, block)
    return name, ([*ends], [math.fsum(run.losses[end - block : end]) / block for end in ends]), run.is_crash

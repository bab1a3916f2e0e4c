"""The page of an ablation: Table 1 and figures 1, 2 and 3 of the paper, of runs of one's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hdet
from hdet.lab.ablation import FULL, Result, Training, headline, mean_text, metric_names, remarks
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

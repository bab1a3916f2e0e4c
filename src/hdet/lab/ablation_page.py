"""The page of an ablation: Table 1 and figures 2 and 3 of the paper, of runs of one's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hdet
from hdet.lab.ablation import FULL, Result, decay_shape, metric_names, remarks
from hdet.lab.page.chart import Chart, line, series_color
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
from hdet.method.recipe import one_cycle

_SMOOTHED = 50  # parts of a run: points are means over them


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
        title="Ablation - hdet",
        footer=f"Written by hdet {hdet.__version__}. The page is one file and loads nothing from elsewhere.",
        body=lambda charts: _body(results, base, charts),
    )


def _body(results: Sequence[Result], base: Mapping[str, Any], charts: PageCharts) -> str:
    said = (
        f"{base['task']}, {base['steps']} steps, {base['replicas']} replicas, {base['optimizer']}. Held-out "
        "loss after the last step."
    )
    names = metric_names(results)
    rows = [
        [
            Cell(result.row.name, result.row.name),
            Cell(f"{result.lr:.3g}", result.lr),
            Cell(result.loss_text, result.loss_text),
            *(Cell(result.metric_text(name), result.metric_text(name)) for name in names),
            Cell(result.row.description, result.row.description),
            Cell(result.row.paper or "-", result.row.paper),
        ]
        for result in results
    ]
    heads = ["row", "LR", "held-out loss", *map(str.upper, names), "what it is", "paper"]
    table = results_html(heads, rows, label="Table 1")
    table += "".join(sentence_html(remark, "common") for remark in remarks(results, base["task"]))
    section = Section("Table 1, and figures 2 and 3", [_losses(results), _rates(results, base)], before=table)
    main = sections_html([section], charts, level=2, num_steps=base["steps"])
    return body_html("The parts of the method", sentence_html(said, "sentence"), main)


def _losses(results: Sequence[Result]) -> Chart:
    """Figure 2: a line per row, of the first seed, less that of plain training at the same learning rate."""
    plain = next(r for r in results if r.row.key == "grid")
    of_plain = plain.runs[0].losses if plain.runs else []
    shown = [r for r in results if r is not plain and r.row.share == 1 and r.runs]
    traces = []
    for place, result in enumerate(sorted(shown, key=lambda r: r.row.key == FULL)):  # it is drawn on top
        pairs = list(zip(result.runs[0].losses, of_plain, strict=False))
        block = max(1, -(-len(pairs) // _SMOOTHED))
        starts = range(len(pairs) // 2, len(pairs) - block + 1, block)
        means = [math.fsum(a - b for a, b in pairs[start : start + block]) / block for start in starts]
        is_full = result.row.key == FULL
        color, width = ("--strong", 3) if is_full else (series_color(place), 1.5)
        steps = [start + block for start in starts]
        traces.append(line(steps, means, result.row.name, color, width=width))
    return Chart(
        title="Training loss, less that of plain training (figure 2)",
        caption=f"Mean of the replicas' losses in the second half of the run minus that of {plain.row.name}, "
        "which has the same learning rate and batches. Below zero a row does better. Of the first seed, "
        "averaged over a fiftieth of the run. Lines that cover each other do not differ.",
        traces=traces,
        y_title="difference of the training loss",
        height=420,
        is_wide=True,
        layout={"xaxis": {"range": [0.49 * len(of_plain), 1.01 * len(of_plain)]}},
    )


def _rates(results: Sequence[Result], base: Mapping[str, Any]) -> Chart:
    """Figure 3: the plan, the controller's decay alone, and HDET (full) by parameter group."""
    steps, lr = range(1, base["steps"] + 1), base["lr"]
    plan = [lr * one_cycle(step - 1, base["steps"]) for step in steps]
    decay = [lr * decay_shape(step - 1, steps=base["steps"]) for step in steps]
    traces = [
        line(list(steps), plan, "plan, no controller", "--series-1"),
        line(list(steps), decay, "the controller's decay alone", ("--series-2", "dot")),
    ]
    full = next(result for result in results if result.row.key == FULL)
    for place, (name, points) in enumerate(full.runs[0].lrs.items() if full.runs else (), start=2):
        places, rates = zip(*points, strict=True)
        traces.append(line(list(places), list(rates), name, (series_color(place)[0], "dash")))
    return Chart(
        title="Learning rates of the parameter groups (figure 3)",
        caption="Dashed: the shared learning rate of each group in HDET (full), of the first seed. What "
        "differs from the dotted line is due to the replicas' losses.",
        traces=traces,
        y_title="learning rate",
        height=420,
        is_wide=True,
        is_log=False,
    )

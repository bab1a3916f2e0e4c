"""Several runs side by side: their curves in one chart, their results in one table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from hdet.lab.page import run_numbers as numbers
from hdet.lab.page.chart import Chart, Trace, curve, series_color, unzip
from hdet.lab.page.html_page import Cell
from hdet.lab.page.loss_charts import final_loss_charts
from hdet.lab.page.read_runs import Run, loss_title
from hdet.lab.page.sentences import duration, figure


def comparison_charts(runs: Sequence[Run], max_points: int) -> Iterable[Chart]:
    """Loss against learning rate, and held-out loss and learning rate of all runs over steps."""
    unit = runs[0].loss_unit if numbers.are_comparable(runs) else ""
    yield from final_loss_charts(runs, _untrained(runs, "loss"), unit)
    losses = _curves(runs, max_points, "loss", unit)
    if losses:
        limits = _limits(runs, "loss")
        caption = "Compare where the curves end, not where they cross."
        caption += " Losses far above the first one are cut off." if limits else ""
        style = {"hover": _hover(losses), "is_log": False, "layout": limits}
        yield Chart("Held-out loss", caption, losses, loss_title(unit), **style)
    rates, peaks = [], []
    for index, run in enumerate(runs):
        steps, values = numbers.base_series(run, next(iter(numbers.learning_rates(run)), ""))
        known = [lr for lr in values if 0 < lr < math.inf]
        if known:
            rates += curve(steps, values, run.name, series_color(index), max_points, width=2.2)
            peaks.append(max(known))
    if rates:
        has_groups = any(len(numbers.learning_rates(run)) > 1 for run in runs)
        caption = "What each run has used."
        caption += " Of several parameter groups, the first is shown." if has_groups else ""
        decades = 2 + math.log10(max(peaks) / min(peaks))
        style = {"hover": _hover(rates), "is_log": True, "max_decades": decades}
        yield Chart("Learning rate over the run", caption, rates, "learning rate", **style)


def metric_charts(runs: Sequence[Run], max_points: int) -> Iterable[Chart]:
    """Metrics that several runs share, over steps."""
    names = dict.fromkeys((name for run in runs for e in run.evaluations for name in e.metrics), 0.0)
    for name in numbers.main_metrics(names):
        curves = _curves(runs, max_points, name, "")
        if len(curves) > 1:
            limits, shown = _limits(runs, name), name.replace("_", " ")
            caption = "Measured on held-out data."
            caption += " Values far worse than the first one are cut off." if limits else ""
            style = {"hover": _hover(curves), "height": 280, "layout": limits}
            yield Chart(f"Metric: {shown}", caption, curves, shown, **style)


def _curves(runs: Sequence[Run], max_points: int, name: str, unit: str) -> list[Trace]:
    traces = []
    for index, run in enumerate(runs):
        x, y = unzip(numbers.evaluated(run, name))
        traces += curve(x, y, run.name, series_color(index), max_points, width=2.2, unit=unit)
    return traces


def _hover(traces: Sequence[Trace]) -> str:
    return "x unified" if len(traces) <= 12 else "closest"


def _untrained(runs: Sequence[Run], name: str) -> float | None:
    """The value before the first step, of the run in the middle where they differ."""
    first = [value for run in runs for step, value in numbers.evaluated(run, name)[:1] if step == 0]
    return statistics.median_low(first) if first else None


def _limits(runs: Sequence[Run], name: str) -> dict[str, Any]:
    """An axis on which a run that went wrong does not flatten the others; empty where there is none.

    The loss, and what falls in most runs, is cut above its first value, and what rises below it.
    """
    untrained = _untrained(runs, name) if numbers.are_comparable(runs) else None
    if untrained is None:
        return {}
    curves = [[value for _, value in numbers.evaluated(run, name)] for run in runs]
    is_falling = name == "loss" or statistics.median(c[-1] for c in curves if c) <= untrained
    sign = 1 if is_falling else -1
    signed = [sign * value for values in curves for value in values]
    low, high = min(signed), numbers.highest_shown(signed, sign * untrained)
    room = 0.05 * (high - low) or 0.1
    ends = sorted([sign * (low - room), sign * (high + room)])
    return {} if high == max(signed) else {"yaxis": {"range": ends}}


def comparison_table(runs: Sequence[Run]) -> tuple[list[str], list[list[Cell]], dict[str, str]]:
    """Final results: a head, a row of cells per run, and what is the same in all runs and has no column.

    The best loss is marked if losses are comparable.
    """
    metrics = numbers.main_metrics({name: 0.0 for run in runs for name in run.final_metrics})
    known = [run.final_loss for run in runs if run.final_loss is not None]
    best = min(known) if len(known) > 1 and numbers.are_comparable(runs) else None
    kept, shared = list[tuple[str, list[Cell]]](), dict[str, str]()
    for column in zip(*(_row(run, list(metrics), best) for run in runs), strict=True):
        name, cells = column[0][0], [cell for _, cell in column]
        is_setting = name in ("controller", "replicas", "steps", "left out", "status")
        if is_setting and len(runs) > 1 and len({cell.text for cell in cells}) == 1:
            shared |= {name: cells[0].text} if cells[0].value is not None else {}
        elif any(cell.value is not None for cell in cells):
            kept.append((name, cells))
    rows = zip(*(cells for _, cells in kept), strict=True)
    return [name for name, _ in kept], [list(row) for row in rows], shared


def _row(run: Run, metrics: Sequence[str], best: float | None) -> list[tuple[str, Cell]]:
    """The results of a run, each with the head of its column."""
    controller = run.config.get("controller")
    is_best = best is not None and run.final_loss == best
    num_left_out = len(run.excluded_events) if run.records else None
    return [
        ("run", Cell(run.name, run.name.lower())),
        ("held-out loss", _number(run.final_loss, 5, is_best=is_best)),
        *((name.replace("_", " "), _number(run.final_metrics.get(name), 5)) for name in metrics),
        ("learning rate asked for", _number(numbers.asked_lr(run))),
        ("learning rate found", _number(numbers.found_lr(run))),
        ("controller", _text(controller if isinstance(controller, str) else "")),
        ("replicas", _number(run.num_replicas)),
        ("steps", Cell(f"{run.last_step:,}", run.last_step)),
        ("time", Cell("-" if run.seconds is None else duration(run.seconds), run.seconds)),
        ("left out", Cell("-" if num_left_out is None else str(num_left_out), num_left_out)),
        ("status", _text(run.status)),
    ]


def _number(value: float | None, digits: int = 3, *, is_best: bool = False) -> Cell:
    return Cell("-" if value is None else figure(value, digits), value, is_best)


def _text(text: str) -> Cell:
    return Cell(text or "-", text.lower() or None)

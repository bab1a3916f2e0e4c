"""Several runs side by side: their curves in one chart, their results in one table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hdet.lab.page.chart import Chart, Trace, line, series_color
from hdet.lab.page.facts import (
    are_comparable,
    asked_lr,
    excluded_events,
    found_lr,
    highest_shown,
    is_sweep,
    main_metrics,
)
from hdet.lab.page.runs import Evaluation, Run, loss_title, number
from hdet.lab.page.schedules import schedule
from hdet.lab.page.series import base_series, learning_rates, thin
from hdet.lab.page.words import duration, figure

_Pick = Callable[[Evaluation], float | None]
"""Chooses a number of an evaluation, where it has one."""


@dataclass(frozen=True)
class Cell:
    """One cell of the table: what is shown, and what it is sorted by."""

    text: str
    value: float | str | None
    is_best: bool = False


def comparison_charts(runs: Sequence[Run], max_points: int) -> Iterable[Chart]:
    """Loss against learning rate, and held-out loss and learning rate of all runs over steps."""
    unit = runs[0].loss_unit if are_comparable(runs) else ""
    yield from _against_rate(runs, unit)
    traces = _curves(runs, max_points, _loss, unit)
    if traces:
        limits = _limits(runs, _loss, is_falling=True)
        yield Chart(
            title="Held-out loss",
            caption="Compare where the curves end, not where they cross."
            + (" Losses far above the first one are cut off." if limits else ""),
            traces=traces,
            y_title=loss_title(unit),
            hover="x unified" if len(traces) <= 12 else "closest",
            is_wide=False,
            height=290,
            is_log=False,
            layout=limits,
        )
    schedules, peaks = [], []
    for index, run in enumerate(runs):
        name = next(iter(learning_rates(run)), None)
        known = [lr for lr in base_series(run, name)[1] if 0 < lr < math.inf] if name is not None else []
        if name is not None and known:
            color, dash = series_color(index)
            schedules.append(schedule(run, name, max_points, color=color, dash=dash, label=run.name))
            peaks.append(max(known))
    if schedules:
        has_groups = any(len(learning_rates(run)) > 1 for run in runs)
        yield Chart(
            title="Learning rate over the run",
            caption="What each run has used."
            + (" Of several parameter groups, the first is shown." if has_groups else ""),
            traces=schedules,
            y_title="learning rate",
            hover="x unified" if len(schedules) <= 12 else "closest",
            is_wide=False,
            height=290,
            is_log=True,
            max_decades=2 + math.log10(max(peaks) / min(peaks)),
        )


def metric_charts(runs: Sequence[Run], max_points: int) -> Iterable[Chart]:
    """Metrics that several runs share, over steps."""
    names = dict.fromkeys(name for run in runs for e in run.evaluations for name in e.metrics)
    for name in main_metrics(dict.fromkeys(names, 0.0)):
        pick = _metric(name)
        curves = _curves(runs, max_points, pick, "")
        if len(curves) > 1:
            shown = name.replace("_", " ")
            limits = _limits(runs, pick)
            yield Chart(
                title=f"Metric: {shown}",
                caption="Measured on held-out data."
                + (" Values far worse than the first one are cut off." if limits else ""),
                traces=curves,
                y_title=shown,
                hover="x unified" if len(curves) <= 12 else "closest",
                is_wide=False,
                height=280,
                layout=limits,
            )


def _against_rate(runs: Sequence[Run], unit: str) -> Iterable[Chart]:
    """Where each run ended, by the learning rate that it came to; one bad run does not flatten the rest."""
    known = [(lr, run) for run in runs if (lr := found_lr(run)) is not None and 0 < lr < math.inf]
    known.sort(key=lambda pair: pair[0])
    losses = [run.final_loss for _, run in known if run.final_loss is not None]
    if len({lr for lr, _ in known}) < 2 or len(losses) < 2 or not are_comparable(runs):
        return
    low, high = min(losses), highest_shown(losses, _untrained(runs, _loss))
    room = 0.08 * (high - low) or 0.1
    shown = [(lr, run, run.final_loss) for lr, run in known if run.final_loss is not None]
    kept = [(lr, run, loss) for lr, run, loss in shown if loss <= high]
    bad = [(lr, run) for lr, run in known if run.final_loss is None or run.final_loss > high]
    template = "%{customdata}<br>learning rate %{x:.4~g}<br>loss %{y:.6~g} %{meta[0]}<extra></extra>"
    is_line = is_sweep(runs)
    points = line([lr for lr, _, _ in kept], [loss for _, _, loss in kept], "runs", "--accent", unit=unit)
    traces: list[Trace] = [
        points
        | {
            "mode": "lines+markers" if is_line else "markers",
            "marker": {"size": 9, "color": "--accent"},
            "customdata": [run.name for _, run, _ in kept],
            "hovertemplate": template,
        }
    ]
    lr, run, loss = min(kept, key=lambda point: point[2])
    best = line([lr], [loss], f"best: {figure(lr)}", "--strong", unit=unit)
    mark = {"size": 15, "symbol": "star", "color": "--strong"}
    traces.append(
        best | {"mode": "markers", "marker": mark, "customdata": [run.name], "hovertemplate": template}
    )
    if bad:
        said = [
            f"{run.name}, loss {figure(run.final_loss) if run.final_loss is not None else 'not finite'}"
            for _, run in bad
        ]
        crosses = line([lr for lr, _ in bad], [high + room / 2] * len(bad), "far above", "--alarm")
        traces.append(
            crosses
            | {
                "mode": "markers",
                "marker": {"size": 9, "symbol": "x-thin", "line": {"width": 2, "color": "--alarm"}},
                "customdata": said,
                "hovertemplate": "%{customdata}<br>learning rate %{x:.4~g}<extra></extra>",
            }
        )
    yield Chart(
        title="Loss against learning rate",
        caption=f"Each dot is a run{'' if is_line else ', at the learning rate that it found'}."
        + (" Crosses at the top are runs whose loss is far above the others, or not finite." if bad else ""),
        traces=traces,
        x_title="learning rate",
        y_title=f"final {loss_title(unit)}",
        is_wide=False,
        height=290,
        is_table_of_points=True,
        layout={"xaxis": {"type": "log"}, "yaxis": {"range": [low - room, high + room]}},
    )


def _loss(evaluation: Evaluation) -> float | None:
    return evaluation.loss


def _metric(name: str) -> _Pick:
    return lambda evaluation: evaluation.metrics.get(name)


def _untrained(runs: Sequence[Run], pick: _Pick) -> float | None:
    """The value before the first step, of the run in the middle where they differ."""
    first = [v for run in runs for e in run.evaluations[:1] if e.step == 0 and (v := pick(e)) is not None]
    return statistics.median_low(first) if first else None


def _limits(runs: Sequence[Run], pick: _Pick, is_falling: bool | None = None) -> dict[str, Any]:
    """An axis on which a run that went wrong does not flatten the others; empty where there is none.

    What falls in most runs, or is said to, is cut above its first value, and what rises below it.
    """
    values = [v for run in runs for e in run.evaluations if (v := pick(e)) is not None]
    untrained = _untrained(runs, pick) if are_comparable(runs) else None
    if untrained is None:
        return {}
    ends = [v for run in runs for e in run.evaluations[-1:] if (v := pick(e)) is not None]
    if is_falling is None:
        is_falling = not ends or statistics.median(ends) <= untrained
    sign = 1 if is_falling else -1
    signed = [sign * value for value in values]
    low, high = min(signed), highest_shown(signed, sign * untrained)
    if high == max(signed):
        return {}
    room = 0.05 * (high - low) or 0.1
    return {"yaxis": {"range": sorted([sign * (low - room), sign * (high + room)])}}


def comparison_table(runs: Sequence[Run]) -> tuple[list[str], list[list[Cell]], dict[str, str]]:
    """Final results: a head, a row of cells per run, and what is the same in all runs and has no column.

    The best loss is marked if losses are comparable.
    """
    head, rows = _full_table(runs)
    columns = dict(zip(head, zip(*rows, strict=True), strict=True))
    shared = {
        name: columns[name][0].text
        for name in ("controller", "replicas", "steps", "left out", "status")
        if len(rows) > 1 and name in columns and len({cell.text for cell in columns[name]}) == 1
    }
    kept = [i for i, name in enumerate(head) if name not in shared]
    return [head[i] for i in kept], [[row[i] for i in kept] for row in rows], shared


def _full_table(runs: Sequence[Run]) -> tuple[list[str], list[list[Cell]]]:
    metrics = list(main_metrics({name: 0.0 for run in runs for name in run.final_metrics}))
    head = [
        "run",
        "held-out loss",
        *(name.replace("_", " ") for name in metrics),
        "learning rate asked for",
        "learning rate found",
        "controller",
        "replicas",
        "steps",
        "time",
    ]
    head += ["left out", "status"]
    known = [run.final_loss for run in runs if run.final_loss is not None]
    best = min(known) if len(known) > 1 and are_comparable(runs) else None
    rows = []
    for run in runs:
        seconds = number(run.result.get("seconds"))
        controller = run.config.get("controller")
        rows.append(
            [
                Cell(run.name, run.name.lower()),
                _number(run.final_loss, 5, is_best=best is not None and run.final_loss == best),
                *(_number(run.final_metrics.get(name), 5) for name in metrics),
                _number(asked_lr(run)),
                _number(found_lr(run)),
                _text(controller if isinstance(controller, str) else ""),
                _number(run.num_replicas),
                Cell(f"{run.last_step:,}", run.last_step),
                Cell(duration(seconds), seconds) if seconds is not None else _text(""),
                Cell(str(len(excluded_events(run))), len(excluded_events(run))) if run.records else _text(""),
                _text(run.status),
            ]
        )
    filled = [i for i in range(len(head)) if any(row[i].value not in (None, "") for row in rows)]
    return [head[i] for i in filled], [[row[i] for i in filled] for row in rows]


def _curves(runs: Sequence[Run], max_points: int, pick: _Pick, unit: str) -> list[Trace]:
    traces = []
    for index, run in enumerate(runs):
        found = [(e.step, pick(e)) for e in run.evaluations if pick(e) is not None]
        kept = thin([[v for _, v in found]], max_points)
        color, dash = series_color(index)
        if kept:
            x, y = [found[i][0] for i in kept], [found[i][1] for i in kept]
            traces.append(line(x, y, run.name, color, dash=dash, width=2.2, unit=unit))
    return traces


def _number(value: float | None, digits: int = 3, *, is_best: bool = False) -> Cell:
    return _text("") if value is None else Cell(figure(value, digits), value, is_best)


def _text(text: str) -> Cell:
    return Cell(text or "-", text.lower() or None)

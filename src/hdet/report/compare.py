"""Several runs side by side: their curves in one chart, their results in one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hdet.report.chart import Chart, Trace, line, series_color
from hdet.report.runs import Evaluation, Run, number
from hdet.report.schedules import schedule
from hdet.report.series import base_series, learning_rates, thin
from hdet.report.words import are_comparable, asked_lr, duration, excluded_events, figure, found_lr

__all__ = ["Cell", "comparison_charts", "comparison_table"]


@dataclass(frozen=True)
class Cell:
    """One cell of the table: what is shown, and what it is sorted by."""

    text: str
    value: float | str | None
    is_best: bool = False


def comparison_charts(runs: Sequence[Run], max_points: int) -> Iterable[Chart]:
    """Held-out loss, learning rate and shared metrics of all runs."""
    units = {run.loss_unit for run in runs}
    unit = units.pop() if len(units) == 1 else ""
    traces = _curves(runs, max_points, lambda evaluation: evaluation.loss, unit)
    if traces:
        yield Chart(
            title="Held-out loss",
            caption="The averaged model of every run. Compare where the curves end, not where they cross.",
            traces=traces,
            y_title=f"loss ({unit})" if unit else "loss",
            hover="x unified" if len(traces) <= 12 else "closest",
            height=400,
            is_log=False,
        )
    schedules = []
    for index, run in enumerate(runs):
        name = next(iter(learning_rates(run)), None)
        if name is not None and base_series(run, name)[0]:
            color, dash = series_color(index)
            schedules.append(schedule(run, name, max_points, color=color, dash=dash, label=run.name))
    if schedules:
        yield Chart(
            title="Learning rate",
            caption="Shared base of every run; of the first parameter group where a run has several. Runs "
            "that started far apart and end close together agree.",
            traces=schedules,
            y_title="learning rate",
            hover="x unified" if len(schedules) <= 12 else "closest",
            is_log=True,
            max_decades=3,
        )
    names = dict.fromkeys(name for run in runs for e in run.evaluations for name in e.metrics)
    for name in names:
        curves = _curves(runs, max_points, lambda evaluation, name=name: evaluation.metrics.get(name), "")
        if name != "loss" and len(curves) > 1:
            yield Chart(
                title=f"Metric: {name}",
                caption="The averaged model of every run on held-out data.",
                traces=curves,
                y_title=name,
                hover="x unified" if len(curves) <= 12 else "closest",
                is_wide=False,
                height=280,
            )


def comparison_table(runs: Sequence[Run]) -> tuple[list[str], list[list[Cell]]]:
    """Final results: a head, and a row of cells per run. The best loss is marked if losses are comparable."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.final_metrics))
    head = [
        "run",
        "held-out loss",
        *metrics,
        "asked lr",
        "found lr",
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


def _curves(
    runs: Sequence[Run], max_points: int, pick: Callable[[Evaluation], float | None], unit: str
) -> list[Trace]:
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

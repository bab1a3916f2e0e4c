"""Charts of values over the run: learning rates and other hyperparameters, their plan and their spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from hdet.lab.page.chart import Chart, Choice, Trace, curve, line, series_color
from hdet.lab.page.read_runs import Run
from hdet.lab.page.replica_lines import values_around
from hdet.lab.page.run_numbers import (
    base_series,
    explored,
    families,
    hyperparameters,
    learning_rates,
    plan_series,
)
from hdet.round_record import is_learning_rate

_Series = Callable[[Run, str], tuple[list[int], list[float]]]


def rate_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """The learning rate over the run, planned and used."""
    names = learning_rates(run)
    traces = _schedules(run, names, "learning rate", max_points)
    if not traces:
        return
    peaks = [max(known) for trace in traces if (known := [y for y in trace["y"] if 0 < y < math.inf])]
    caption = "Every step used the learning rate that was planned."
    if any(trace["meta"][1:] == ["aside"] for trace in traces):
        caption = "The solid line is what was used. The dotted line is what was planned."
    before = [0, *(record.num_brakes for record in run.records)]
    brakes = [r.step for r, count in zip(run.records, before, strict=False) if r.num_brakes > count]
    if brakes:
        caption += " At the crosses the run had collapsed, and the guard went back."
        used = dict(zip(*base_series(run, names[0]), strict=True))
        marker = {"size": 10, "symbol": "x", "color": "--alarm"}
        given_up = [used.get(step) for step in brakes]
        traces.append(line(brakes, given_up, "guard went back", "--alarm", mode="markers", marker=marker))
    yield Chart(
        "Learning rate over the run",
        caption,
        traces,
        "learning rate",
        hover="x unified",
        is_log=bool(peaks) and max(peaks) > 10 * min(peaks),
        max_decades=3,
        layout={"yaxis": {"rangemode": "tozero"}},
    )


def hyperparameter_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """Draw what differed between replicas, and the schedules of everything else but the learning rate."""
    choices = []
    for name in explored(run):
        base = curve(*base_series(run, name), "base", "--strong", max_points, width=3)
        plan = _planned(run, name, max_points, "--muted", "planned")
        choices += [Choice(name, [*values_around(run, name, max_points), *plan, *base], name)] if base else []
    style = {"is_log": True, "max_decades": 3}
    if choices:
        caption = "The strong line is the shared value. The band reaches from the lowest replica to the "
        caption += "highest. Dots are the replicas at the end of each round. A dotted line is the plan."
        key = {"choices": choices, "choice_label": "Show", "has_spread_key": True}
        yield Chart("Values and their spread", caption, is_wide=True, height=380, **style, **key)
    caption = "The shared value over the run. A dotted line is the plan. "
    caption += "Groups with equal values share a line."
    shown = [[choice.label] for choice in choices]
    others = (name for name in hyperparameters(run) if not is_learning_rate(name))
    for family, members in families(others).items():
        traces = _schedules(run, members, family, max_points)
        if members not in shown and any(len(set(trace["y"])) > 1 for trace in traces):
            yield Chart(f"Schedule: {family}", caption, traces, family, hover="x unified", **style)


def _schedules(run: Run, names: Sequence[str], what: str, max_points: int) -> list[Trace]:
    """Draw what was used and, where that differs, what was planned; names that are equal share a line."""
    used, plans = _equal(run, names, base_series), _equal(run, names, plan_series)
    traces = []
    for members in plans:
        color, label = "--muted", "planned"
        if len(plans) > 1:
            place = next((i for i, others in enumerate(used) if members[0] in others), 0)
            color, label = series_color(place)[0], f"{', '.join(members)}, planned"
        traces += _planned(run, members[0], max_points, color, label)
    for index, members in enumerate(used):
        label = ", ".join(members) if len(used) > 1 else what
        color = series_color(index, len(used))
        traces += curve(*base_series(run, members[0]), label, color, max_points, width=2.2)
    return traces


def _planned(run: Run, name: str, max_points: int, color: str, label: str) -> list[Trace]:
    """The schedule as it was planned, as a dotted line; nothing if that was kept to."""
    # A plan may fall far below the base that was learned: the axis does not follow it there.
    series, aside = plan_series(run, name), ["", "aside"]
    return curve(*series, label, (color, "dot"), max_points // 2, width=1.5, meta=aside)


def _equal(run: Run, names: Sequence[str], series: _Series) -> list[list[str]]:
    """Names together whose series are equal but for rounding; those without one are left out."""
    found: dict[object, list[str]] = {}
    for name in names:
        steps, values = series(run, name)
        if steps:
            found.setdefault((tuple(steps), tuple(f"{v:.9g}" for v in values)), []).append(name)
    return list(found.values())

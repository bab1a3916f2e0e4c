"""Charts of values over the run: learning rates and other hyperparameters, their plan and their spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from hdet.lab.page.chart import (
    Chart,
    Choice,
    Trace,
    band,
    legend_entry,
    line,
    series_color,
    spread_color,
    thin,
)
from hdet.lab.page.read_runs import Run
from hdet.lab.page.run_numbers import (
    base_series,
    by_slot,
    explored,
    families,
    fan_limits,
    learning_rates,
    plan_series,
)
from hdet.records.names import is_learning_rate

_Series = Callable[[Run, str], tuple[list[int], list[float]]]


def rate_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """The learning rate over the run, planned and used."""
    traces = _schedules(run, learning_rates(run), "learning rate", max_points)
    if not traces:
        return
    peaks = [max(known) for trace in traces if (known := [y for y in trace["y"] if 0 < y < math.inf])]
    has_plan = any(trace["meta"][1:] == ["aside"] for trace in traces)
    caption = "Every step used the learning rate that was planned."
    if has_plan:
        caption = "The solid line is what was used. The dotted line is what was planned."
    if run.num_brakes:
        caption += " At the crosses the run had collapsed, and the guard went back."
    yield Chart(
        title="Learning rate over the run",
        caption=caption,
        traces=[*traces, *_brakes(run)],
        y_title="learning rate",
        hover="x unified",
        is_log=bool(peaks) and max(peaks) > 10 * min(peaks),
        max_decades=3,
        layout={"yaxis": {"rangemode": "tozero"}},
    )


def hyperparameter_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """What differed between replicas, and the schedules of everything else but the learning rate."""
    names = [name for name in explored(run) if base_series(run, name)[0]]
    if names:
        yield Chart(
            title="Values and their spread",
            caption="The strong line is the shared value. The band reaches from the lowest replica to the "
            "highest. Dots are the replicas at the end of each round. A dotted line is the plan.",
            is_wide=True,
            is_log=True,
            max_decades=3,
            height=380,
            choices=[Choice(name, _fan(run, name, max_points), y_title=name) for name in names],
            choice_label="Show",
            has_spread_key=True,
        )
    named = dict.fromkeys(name for record in run.records for name in (*record.base, *record.base_trace))
    for family, members in families(name for name in named if not is_learning_rate(name)).items():
        traces = _schedules(run, members, family, max_points)
        is_shown = len(members) == 1 and members[0] in names
        if not is_shown and any(len(set(trace["y"])) > 1 for trace in traces):
            yield Chart(
                title=f"Schedule: {family}",
                caption="The shared value over the run. A dotted line is the plan. Groups with equal values "
                "share a line.",
                traces=traces,
                y_title=family,
                hover="x unified",
                is_log=True,
                max_decades=3,
            )


def _schedules(run: Run, names: Sequence[str], what: str, max_points: int) -> list[Trace]:
    """What was used and, where that differs, what was planned; names that are equal share a line."""
    used, plans = _equal(run, names, base_series), _equal(run, names, plan_series)
    traces = []
    for members in plans:
        color, label = "--muted", "planned"
        if len(plans) > 1:
            place = next((i for i, others in enumerate(used) if members[0] in others), 0)
            color, label = series_color(place)[0], f"{', '.join(members)}, planned"
        traces += _planned(run, members[0], max_points, color, label)
    for index, members in enumerate(used):
        color, dash = series_color(index, len(used))
        label = ", ".join(members) if len(used) > 1 else what
        series = base_series(run, members[0])
        traces.append(line(*series, label, color, dash=dash, width=2.2, max_points=max_points))
    return traces


def _planned(run: Run, name: str, max_points: int, color: str, label: str) -> list[Trace]:
    """What the schedule had planned, as a dotted line; nothing if that was kept to."""
    # A plan may fall far below the base that was learned: the axis does not follow it there.
    style = {"width": 1.5, "dash": "dot", "role": "aside", "max_points": max_points // 2}
    trace = line(*plan_series(run, name), label, color, **style)
    return [trace] if trace["x"] else []


def _equal(run: Run, names: Sequence[str], series: _Series) -> list[list[str]]:
    """Names together whose series are equal but for rounding; those without one are left out."""
    found: dict[object, list[str]] = {}
    for name in names:
        steps, values = series(run, name)
        if steps:
            found.setdefault((tuple(steps), tuple(f"{v:.9g}" for v in values)), []).append(name)
    return list(found.values())


def _brakes(run: Run) -> list[Trace]:
    """Where the guard went back, on the learning rate that it gave up."""
    before = [0, *(record.num_brakes for record in run.records)]
    steps = [r.step for r, count in zip(run.records, before, strict=False) if r.num_brakes > count]
    if not steps:
        return []
    used = dict(zip(*base_series(run, learning_rates(run)[0]), strict=True))
    marker = {"size": 10, "symbol": "x", "color": "--alarm"}
    heights = [used.get(step) for step in steps]
    return [line(steps, heights, "guard went back", "--alarm", mode="markers", marker=marker)]


def _fan(run: Run, name: str, max_points: int) -> list[Trace]:
    """The base of a hyperparameter, its plan, and the values of the replicas around it."""
    steps, low, high = fan_limits(run, name)
    kept = thin([low, high], max_points // 2)
    edges = ([steps[i] for i in kept], [low[i] for i in kept], [high[i] for i in kept])
    traces = band(*edges, ("lowest replica", "highest replica"), "band")
    records = [record for record in run.records if record.ends_round and name in record.values]
    slots = by_slot(records, "values", name) if max_points >= 120 else []
    slots = slots if len(slots) <= 16 else []  # the band says enough
    size = max(1, math.ceil(len(records) * len(slots) / (max_points // 2)))
    x = [record.step for record in records[::size]]
    for position, values, replicas in slots:
        color = spread_color(position)
        dots = line(x, values[::size], f"replica at {position:+.2f}", color, mode="markers")
        traces.append(
            dots
            | {
                "marker": {"color": color, "size": 4.5},
                "legendgroup": "band",
                "showlegend": False,
                "customdata": replicas[::size],
                "hovertemplate": "replica %{customdata}<br>step %{x:,}<br>%{y:.6~g}<extra></extra>",
            }
        )
    traces.append(legend_entry("replicas", "--band", "band", 8))
    traces += _planned(run, name, max_points, "--muted", "planned")
    return [*traces, line(*base_series(run, name), "base", "--strong", width=3, max_points=max_points)]

"""The learning rate over the run, planned and used, and the schedules of other hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hdet.lab.page.chart import Chart, Trace, line, series_color
from hdet.lab.page.facts import num_brakes
from hdet.lab.page.runs import Run
from hdet.lab.page.series import base_series, learning_rates, plan_series, thin


def rate_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """The learning rate over the run, planned and used."""
    traces = schedules(run, learning_rates(run), "learning rate", max_points)
    if traces:
        peaks = [max(known) for trace in traces if (known := [y for y in trace["y"] if 0 < y < math.inf])]
        has_plan = any(trace["meta"][1:] == ["aside"] for trace in traces)
        yield Chart(
            title="Learning rate over the run",
            caption=(
                "The solid line is what was used. The dotted line is what was planned."
                if has_plan
                else "Every step used the learning rate that was planned."
            )
            + (" At the crosses the run had collapsed, and the guard went back." if num_brakes(run) else ""),
            traces=[*traces, *_brakes(run)],
            y_title="learning rate",
            hover="x unified",
            is_wide=False,
            height=290,
            is_log=bool(peaks) and max(peaks) > 10 * min(peaks),
            max_decades=3,
            layout={"yaxis": {"rangemode": "tozero"}},
        )


def schedules(run: Run, names: Sequence[str], what: str, max_points: int) -> list[Trace]:
    """What was used and, where that differs, what was planned; names that are equal share a line."""
    used = _equal(names, lambda name: base_series(run, name))
    plans = _equal(names, lambda name: plan_series(run, name))
    traces = []
    for members in plans:
        is_all = len(plans) == 1
        color, _ = ("--muted", "") if is_all else series_color(_place(members[0], used))
        label = "planned" if is_all else f"{', '.join(members)}, planned"
        traces += planned(run, members[0], max_points, color, label)
    for index, members in enumerate(used):
        color, dash = series_color(index) if len(used) > 1 else ("--accent", "solid")
        label = ", ".join(members) if len(used) > 1 else what
        traces.append(schedule(run, members[0], max_points, color=color, dash=dash, label=label))
    return traces


def schedule(run: Run, name: str, max_points: int, *, color: str, **style: Any) -> Trace:
    """The base of a hyperparameter over steps, as a line."""
    steps, values = base_series(run, name)
    kept = thin([values], max_points)
    style = {"label": name, "width": 2.2} | style
    return line([steps[i] for i in kept], [values[i] for i in kept], style.pop("label"), color, **style)


def planned(run: Run, name: str, max_points: int, color: str, label: str) -> list[Trace]:
    """What the schedule had planned, as a dotted line; nothing if that was kept to."""
    steps, values = plan_series(run, name)
    kept = thin([values], max_points // 2)
    trace = line([steps[i] for i in kept], [values[i] for i in kept], label, color, width=1.5, dash="dot")
    # A plan may fall far below the base that was learned: the axis does not follow it there.
    return [{**trace, "meta": ["", "aside"]}] if kept else []


def _equal(names: Sequence[str], series: Callable[[str], tuple[list[int], list[float]]]) -> list[list[str]]:
    """Names together whose series are equal but for rounding; those without one are left out."""
    found: dict[object, list[str]] = {}
    for name in names:
        steps, values = series(name)
        if steps:
            found.setdefault((tuple(steps), tuple(f"{v:.9g}" for v in values)), []).append(name)
    return list(found.values())


def _place(name: str, groups: Sequence[Sequence[str]]) -> int:
    return next((index for index, members in enumerate(groups) if name in members), 0)


def _brakes(run: Run) -> list[Trace]:
    """Where the guard went back, on the learning rate that it gave up."""
    names, before, steps = learning_rates(run), 0, list[int]()
    for record in run.records:
        steps += [record.step] * (record.num_brakes > before)
        before = record.num_brakes
    if not (steps and names):
        return []
    used = dict(zip(*base_series(run, names[0]), strict=True))
    marks = line(steps, [used.get(step) for step in steps], "guard went back", "--alarm")
    return [marks | {"mode": "markers", "marker": {"size": 10, "symbol": "x", "color": "--alarm"}}]

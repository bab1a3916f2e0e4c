"""Charts of values over the run: learning rates and other hyperparameters, their plan and their spread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from hdet.lab.page import run_numbers as numbers
from hdet.lab.page.chart import Chart, Trace, band, curve, line, series_color, thin, unzip
from hdet.lab.page.read_runs import Run
from hdet.lab.page.sentences import looks_sentence
from hdet.lab.page.what_held_out_data_said import Looks, what_held_out_data_said
from hdet.lab.page.what_replicas_said import explored, what_replicas_said
from hdet.method.thermostat import Thermostat
from hdet.round_record import is_learning_rate

_MAX_MARKS = 200


def rate_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """The learning rate over the run: its base, the values of the replicas around it, the plan, and why."""
    names = numbers.learning_rates(run)
    traces = _values(run, names, "learning rate", max_points)
    if not traces:
        return
    peaks = [max(known) for trace in traces if (known := [y for y in trace["y"] if 0 < y < math.inf])]
    caption = _caption(traces) or "Every step used the learning rate that was planned."
    synced = {record.step for record in run.records if record.ends_round}
    if traces[0]["name"].startswith("replicas"):
        marks = [p for p in zip(*numbers.base_series(run, names[0]), strict=True) if p[0] in synced]
        marker = {"symbol": "line-ns", "size": 7, "line": {"width": 1, "color": "--strong"}}
        style: dict[str, Any] = {"mode": "markers", "marker": marker, "meta": ["", "mark"]}
        caption += f" The replicas were averaged at {len(synced):,} syncs."
        if len(marks) <= _MAX_MARKS:
            traces.append(line(*unzip(marks), "sync", "--strong", **style))
    before = [0, *(record.num_brakes for record in run.records)]
    brakes = [r.step for r, count in zip(run.records, before, strict=False) if r.num_brakes > count]
    if brakes:
        caption += " At the crosses the run had collapsed, and the guard went back."
        used = dict(zip(*numbers.base_series(run, names[0]), strict=True))
        marker = {"size": 10, "symbol": "x", "color": "--alarm"}
        given_up = [used.get(step) for step in brakes]
        traces.append(line(brakes, given_up, "guard went back", "--alarm", mode="markers", marker=marker))
    is_log = bool(peaks) and max(peaks) > 10 * min(peaks)
    style = {"hover": "x unified", "max_decades": 3, "layout": {"yaxis": {"rangemode": "tozero"}}}
    yield Chart("Learning rate over the run", caption, traces, "learning rate", is_log=is_log, **style)
    yield from _averaging_charts(run)


def _averaging_charts(run: Run) -> Iterable[Chart]:
    """Draw what a thermostat has judged the learning rate by."""
    seen = [
        (record.step, gain, Thermostat.target * max(0.0, progress))
        for record in run.records
        for gain, progress in zip(record.averaging_gains, record.time_gains, strict=False)
        if gain is not None and progress is not None
    ]
    if seen:
        caption = (
            "At the end of each round the thermostat scored the last weights and the mean of the round's "
            "weights on held-out data. Where averaging gained more than the dotted line, the learning rate "
            f"was too high. Where it gained less, it was too low. The line is {Thermostat.target:g} of what "
            "an e-fold of steps gained."
        )
        steps, gains, right = map(list, zip(*seen, strict=True))
        traces = [line(steps, gains, "averaging gained", "--accent", mode="lines+markers")]
        traces.append(line(steps, right, "right", ("--strong", "dot")))
        yield Chart("What averaging gains", caption, traces, "fall of the held-out loss", hover="x unified")


def value_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """Every other hyperparameter that replicas explored, or that changed or was looked at over the run."""
    others = (name for name in numbers.hyperparameters(run) if not is_learning_rate(name))
    said = {one.name: one.sentence for one in what_replicas_said(run.records)}
    looks = {one.name: one for one in what_held_out_data_said(run.records)}
    names = {*explored(run.records), *looks}
    for family, members in numbers.families(others).items():
        traces = _values(run, members, family, max_points)
        is_moving = any(len(set(trace["y"])) > 1 for trace in traces)
        if is_moving or (traces and names & set(members)):
            caption = _caption(traces) or "The value that every replica used."
            told = [said[name] for name in members if name in said]
            told += [looks_sentence(looks[name]) for name in members if name in looks]
            caption = " ".join([caption, *told])
            yield Chart(f"{family} over the run", caption, traces, family, hover="x unified", is_log=True)
        yield from (_slope_chart(looks[name]) for name in members if name in looks)


def _slope_chart(looks: Looks) -> Chart:
    """Draw what held-out data said at each look, with two standard errors."""
    what = looks.name.replace("_", " ")
    caption = (
        "Each dot is a look at held-out data, with two standard errors. Below zero smaller weights would "
        f"score better, and {what} is added. Above zero they would score worse, and {what} is taken away "
        "only where the held-out loss is close to the training loss. Two looks that agree move it, by how "
        "sure both are and by how far the held-out loss is above the training loss. So looks whose bars "
        f"include zero still move it a little. {looks.verdict}."
    )
    errors = [2 * look.error for look in looks.slopes]
    bars = {"type": "data", "array": errors, "thickness": 1, "width": 3, "color": "--accent"}
    style: dict[str, Any] = {"mode": "markers", "marker": {"size": 7, "color": "--accent"}, "error_y": bars}
    style["customdata"] = [f"± {error:.3g}" for error in errors]
    style["hovertemplate"] = "step %{x:,}<br>%{y:+.3~g} %{customdata}<extra></extra>"
    steps = [look.step for look in looks.slopes]
    dots = line(
        steps, [look.slope for look in looks.slopes], "rise of the held-out loss", "--accent", **style
    )
    ends: dict[str, Any] = {"meta": ["", "mark"], "showlegend": False, "hoverinfo": "skip", "width": 1}
    zero = line([steps[0], steps[-1]], [0.0, 0.0], "zero", ("--strong", "dash"), hovertemplate=None, **ends)
    return Chart("Would smaller weights help?", caption, [zero, dots], "rise per e-fold of shrinking")


def _caption(traces: Sequence[Trace]) -> str:
    names = {trace["name"] for trace in traces}
    said = []
    if "replicas" in names:
        said.append("Each replica used a value of its own within the band. The line is the base.")
    if any(trace["meta"][1:] == ["aside"] for trace in traces):
        said.append("The dotted line is what was planned.")
    return " ".join(said)


def _values(run: Run, names: Sequence[str], what: str, max_points: int) -> list[Trace]:
    """Draw bands, plans where they were not kept to, and bases; what is equal is drawn once."""
    used: dict[object, list[str]] = {}
    for name in names:
        steps, values = numbers.base_series(run, name)
        if steps:
            used.setdefault((*steps, *(f"{v:.9g}" for v in values)), []).append(name)
    plans: dict[object, tuple[list[int], list[float]]] = {}
    traces = []
    for name, *_ in used.values():
        steps, low, high = numbers.fan_limits(run, name)
        kept = thin([low, high], max_points // 2)
        ends = [low[i] for i in kept], [high[i] for i in kept]
        traces += band([steps[i] for i in kept], *ends, "replicas", showlegend=not traces)
        steps, values = numbers.plan_series(run, name)
        plans[(*steps, *(f"{v:.9g}" for v in values))] = steps, values
    for plan in plans.values():
        # A plan may fall far below the base that was learned: the axis does not follow it there.
        style = {"width": 1.5, "meta": ["", "aside"]}
        traces += curve(*plan, "planned", ("--muted", "dot"), max_points // 2, **style)
    for index, members in enumerate(used.values()):
        label = ", ".join(members) if len(used) > 1 else what
        color = series_color(index, len(used))
        traces += curve(*numbers.base_series(run, members[0]), label, color, max_points, width=2.2)
    return traces

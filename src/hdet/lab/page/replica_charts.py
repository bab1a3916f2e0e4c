"""Charts of the replicas and their syncs: what they said, the controller, cost, and who was left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from hdet.lab.page.chart import Chart, Trace, curve, line, series_color, thin, unzip
from hdet.lab.page.read_runs import Run
from hdet.lab.page.run_numbers import families
from hdet.lab.page.what_replicas_said import Mean, explored, mean_of, means_by_place, what_replicas_said

_MAX_BARS = 240
_MAX_MARKS = 2000
_PHASE_COLORS = {"probe": 1, "measure": 5, "converge": 4, "steer": 3}
_NUM_STRETCHES = 12
_OVER_MEAN = "value over the mean value"


def said_over_run_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """Draw which side did better in parts of the run."""
    said, traces = what_replicas_said(run.records), list[Trace]()
    for index, one in enumerate(said):
        size = max(2, math.ceil(len(one.rounds) / _NUM_STRETCHES))
        stretches = [one.rounds[i : i + size] for i in range(0, len(one.rounds) - size + 1, size)]
        means = [mean_of([difference for _, difference in part], part[-1][0]) for part in stretches]
        traces.append(_with_errors(means, one.name, series_color(index, len(said))[0]))
    if traces:
        caption = "Loss at the highest value minus loss at the lowest. Below zero, higher values did better. "
        caption += "Each dot is a mean over the rounds since the dot before it, with two standard errors."
        yield Chart("What the replicas said", caption, traces, "loss difference")


def said_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """Draw the replicas' losses against their values, over all rounds or those since the side changed."""
    said = what_replicas_said(run.records)
    against = list[Trace]()
    for index, one in enumerate(said):
        color, (slope, _) = series_color(index, len(said))[0], one.slope
        against.append(_with_errors(one.places, one.name, color, mode="markers", legendgroup=one.name))
        logs = [math.log(place.place) for place in one.places]
        fitted = [slope * (x - sum(logs) / len(logs)) for x in logs]
        style = {"legendgroup": one.name, "showlegend": False, "meta": ["", "mark"], "hoverinfo": "skip"}
        x = [place.place for place in one.places]
        against.append(line(x, fitted, f"{one.name}, fitted", color, width=1.5, **style))
    if said:
        caption = " ".join(one.sentence for one in said)
        for one in said:
            since = f" after step {one.turn:,}" if one.turn else ""
            caption += f" Slope of the loss on the log of {one.name}{since}: "
            caption += f"{one.slope[0]:+.2g} ± {one.slope[1]:.1g}."
        caption += " ± is one standard error, a bar is two. Short rounds favour small learning rates, so the "
        caption += "better side of a round is not always the better one in the end."
        title = "Losses of the replicas against their values"
        yield Chart(title, caption, against, "loss minus mean of the round", _OVER_MEAN)


def _with_errors(means: Sequence[Mean], name: str, color: str, **style: Any) -> Trace:
    """Dots at means, with bars of two standard errors."""
    errors = [2 * mean.error for mean in means]
    bars = {"type": "data", "array": errors, "thickness": 1, "width": 3, "color": color}
    said = [f"± {2 * mean.error:.3g}, over {mean.num} rounds" for mean in means]
    hover = "%{fullData.name}<br>at %{x:.6~g}<br>%{y:+.3~g} %{customdata}<extra></extra>"
    more = {"mode": "lines+markers", "marker": {"size": 7, "color": color}, "customdata": said} | style
    x, y = [mean.place for mean in means], [mean.mean for mean in means]
    return line(x, y, name, color, error_y=bars, hovertemplate=hover, **more)


def controller_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """Draw which way the losses pointed, and how much each replica counted."""
    records = [record for record in run.records if record.ends_round]
    moved = (name for record in records for name in (*record.signal, *record.velocity))
    by_held_out_data = {name for record in records for name in record.slope}
    names = [name for name in dict.fromkeys(moved) if name not in by_held_out_data]
    for family, members in families(names).items():
        traces = []
        for index, name in enumerate(members):
            color, style = series_color(index, len(members)), {"legendgroup": name}
            signal, velocity = (
                unzip([(r.step, values[name]) for r in records if name in (values := getattr(r, field))])
                for field in ("signal", "velocity")
            )
            dots = {"mode": "markers", "marker": {"color": color[0], "size": 5, "opacity": 0.45}}
            traces += curve(*signal, f"{name}, signal", color, max_points // 2, **dots, **style)
            traces += curve(*velocity, f"{name}, velocity", color, max_points // 2, **style)
        if any(v for trace in traces for v in trace["y"]):
            caption = "Each dot says which way the replicas' losses pointed in a round. The line is their "
            caption += "running mean. Above zero means towards larger values. "
            caption += "Dots on both sides alike are noise."
            yield Chart(f"Signal and velocity: {family}", caption, traces, "direction")
    if any(len(set(record.weights)) > 1 for record in records):
        caption = "How much a replica counted for the controller (eq. 4), by its value: means over the "
        caption += "rounds, with two standard errors. The controller moves towards the heavier side."
        weights = []
        for index, name in enumerate(explored(records)):
            means = means_by_place(records, name, lambda record: record.weights)
            weights += [_with_errors(means, name, series_color(index)[0])] if means else []
        yield Chart("Weights of the replicas", caption, weights, "weight", _OVER_MEAN)


def health_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """Draw what the syncs cost, and which replicas were left out."""
    timed = [record for record in run.records if record.milliseconds]
    timed = [timed[i] for i in thin([[sum(r.milliseconds.values()) for r in timed]], _MAX_BARS)]
    steps, cost = [record.step for record in timed], list[Trace]()
    named = (name for record in timed for name in record.milliseconds)
    for index, name in enumerate(_PHASE_COLORS | dict.fromkeys(named)):
        heights = [record.milliseconds.get(name, 0.0) for record in timed]
        color = f"--series-{_PHASE_COLORS.get(name, index % 8 + 1)}"
        cost += [line(steps, heights, name, color, unit="ms", stackgroup="cost")] if any(heights) else []
    if cost:
        caption = "Time on the host, by what it was spent on. The first sync also sets up buffers. "
        caption += "A rising trend is worth a look."
        yield Chart("Cost of the syncs", caption, cost, "milliseconds", hover="x unified", height=280)
    left_out = _left_out(run)
    if left_out:
        caption = "Each mark is a sync in which a replica did not count, or had losses that were not finite. "
        caption += "A replica that was left out gets the mean of the others, and goes on from it. "
        caption += "Marks in one row point at one worker. Marks in one column point at the step."
        known = [r + 1 for _, r, _ in run.excluded_events] + [len(record.losses) for record in run.records]
        axis = {"range": [max(known) - 0.5, -0.5], "dtick": max(1, max(known) // 8), "tick0": 0}
        layout = {"xaxis": {"range": [0, 1.03 * run.last_step]}, "yaxis": axis}
        style = {"height": 280, "is_table_of_points": True, "layout": layout}
        yield Chart("Replicas left out and healed", caption, left_out, "replica", **style)


def _left_out(run: Run) -> list[Trace]:
    """Marks for the replicas that did not count, and for those that had losses that were not finite."""
    counts = [
        (record.step, replica, f"{count} losses were not finite" if count > 1 else "one loss was not finite")
        for record in run.records
        for replica, count in enumerate(record.num_nonfinite_losses)
        if count and replica not in record.excluded
    ]
    hover = "replica %{y}<br>step %{x:,}<br>%{customdata}<extra></extra>"
    traces = []
    for events, name, symbol, color in (
        (run.excluded_events[:_MAX_MARKS], "left out of the mean", "x", "--alarm"),
        (counts[:_MAX_MARKS], "losses not finite", "circle-open", "--replica"),
    ):
        if events:
            x, y, reasons = (list(column) for column in zip(*events, strict=True))
            marker = {"color": color, "size": 10, "symbol": symbol}
            style = {"mode": "markers", "marker": marker, "hovertemplate": hover, "customdata": reasons}
            traces.append(line(x, y, name, color, **style))
    return traces

"""Charts of the syncs: what the controller saw and made of it, what they cost, and who was left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hdet.lab.page.chart import Chart, Choice, Trace, line, series_color, unzip
from hdet.lab.page.read_runs import Run
from hdet.lab.page.run_numbers import (
    across_spread,
    by_replica,
    by_slot,
    differences_from_mean,
    explored,
    families,
)
from hdet.records import RoundRecord

_MAX_BARS = 240
_MAX_MARKS = 2000
_PHASE_COLORS = {"probe": 1, "measure": 5, "converge": 4, "steer": 3}


def controller_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """What the controller saw and what it made of it."""
    records = [record for record in run.records if record.ends_round]
    corrected = dict.fromkeys(name for record in records for name in record.correction)
    corrections = _by_name(records, "correction", max_points, list(corrected))
    # The paper's form holds the base itself: against a plan that falls to zero, its factor says nothing.
    is_factor = run.config.get("controller") != "paper" and run.compares
    if is_factor and any(abs(v - 1) > 1e-9 for trace in corrections for v in trace["y"]):
        yield Chart(
            title="Correction",
            caption="The factor that the controller puts on the plan. Above one it asks for more than the "
            "plan. A level line means that it has settled.",
            traces=corrections,
            y_title="base / planned value",
            hover="x unified",
            is_log=True,
            max_decades=3,
        )
    names = dict.fromkeys(name for record in records for name in (*record.signal, *record.velocity))
    for family, members in families(names).items():
        signals = _by_name(records, "signal", max_points, members)
        for trace in signals:
            marker = {"color": trace["line"]["color"], "size": 5, "opacity": 0.45}
            trace |= {"mode": "markers", "marker": marker, "name": f"{trace['name']}, signal"}
        velocities = _by_name(records, "velocity", max_points, members)
        for trace in velocities:
            trace["name"] += ", velocity"
        if any(v for trace in [*signals, *velocities] for v in trace["y"]):
            yield Chart(
                title=f"Signal and velocity: {family}",
                caption="Each dot says which way the replicas' losses pointed in a round. The line is their "
                "running mean. Above zero means towards larger values. Dots on both sides alike are noise.",
                traces=[*signals, *velocities],
                y_title="direction",
            )
    advantage = _advantage(run, records)
    if advantage:
        yield Chart(
            title="Loss across the spread",
            caption="Loss at each place of the spread minus the mean of its round, over all rounds, with two "
            "standard errors. A slope shows which side did better within a round. Short rounds favour "
            "small learning rates, so this is not always better in the long run.",
            traces=advantage,
            x_title="factor on the base",
            y_title="loss difference",
        )
    weights = _weights(run, records, max_points)
    if weights:
        rows = len(weights[0].traces[0]["y"])
        yield Chart(
            title="Weights of the replicas",
            caption="How much each replica counted in each round (eq. 4 of the paper). The controller moves "
            "to the side of the strong rows.",
            is_wide=True,
            height=150 + 18 * min(32, rows),
            choices=weights,
            choice_label="Rows",
            layout={"yaxis": {"type": "category", "dtick": math.ceil(rows / 32), "tickmode": "linear"}},
        )


def health_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """What the syncs cost, and which replicas were left out."""
    timed = [record for record in run.records if record.milliseconds]
    size = max(1, math.ceil(len(timed) / _MAX_BARS))
    cost = _cost([timed[i : i + size] for i in range(0, len(timed), size)])
    if cost:
        each = "every sync" if size == 1 else f"a sync, as means over {size} of them"
        # A few ticks, with the first and the last: a category axis would leave out the last.
        steps = cost[0]["x"]
        ticks = sorted({round(i * (len(steps) - 1) / 5) for i in range(6)})
        axis = {"type": "category", "tickmode": "array", "tickvals": [steps[i] for i in ticks]}
        yield Chart(
            title="Cost of the syncs",
            caption=f"Time on the host for {each}, by what it was spent on. The first sync also sets up "
            "buffers. A rising trend is worth a look.",
            traces=cost,
            y_title="milliseconds",
            hover="x unified",
            height=280,
            layout={"barmode": "stack", "bargap": 0.15, "xaxis": axis},
        )
    left_out = _left_out(run)
    if left_out:
        seen = (r + 1 for _, r, _ in run.excluded_events)
        replicas = max(seen, default=0)
        replicas = max([replicas, *(len(record.losses) for record in run.records)])
        axis = {"range": [replicas - 0.5, -0.5], "dtick": max(1, replicas // 8), "tick0": 0}
        yield Chart(
            title="Replicas left out",
            caption="Each mark is a sync in which a replica did not count, or had losses that were not "
            "finite. Marks in one row point at one worker. Marks in one column point at the step.",
            traces=left_out,
            y_title="replica",
            height=280,
            is_table_of_points=True,
            layout={"xaxis": {"range": [0, 1.03 * run.last_step]}, "yaxis": axis},
        )


def _by_name(
    records: Sequence[RoundRecord], field: str, max_points: int, names: Sequence[str]
) -> list[Trace]:
    traces = []
    for index, name in enumerate(names):
        points = [(r.step, getattr(r, field)[name]) for r in records if name in getattr(r, field)]
        color, dash = series_color(index, len(names))
        style = {"dash": dash, "legendgroup": name, "max_points": max_points // 2}
        traces += [line(*unzip(points), name, color, **style)] if points else []
    return traces


def _advantage(run: Run, records: Sequence[RoundRecord]) -> list[Trace]:
    """For every place in the spread: its factor, and its loss against the mean of the round."""
    traces = []
    differences = differences_from_mean(records)
    for index, name in enumerate(explored(run)):
        places = [place for place in across_spread(records, differences, name) if place.num_rounds > 2]
        if len(places) < 2:
            continue
        color, _ = series_color(index)
        hover = "%{fullData.name}<br>factor %{x:.4~g}<br>%{y:+.3~g} %{customdata}<extra></extra>"
        errors = [2 * place.error for place in places]
        trace = line([place.factor for place in places], [place.mean for place in places], name, color)
        trace |= {
            "mode": "lines+markers",
            "marker": {"size": 7},
            "hovertemplate": hover,
            "customdata": [f"± {2 * p.error:.3g}, over {p.num_rounds} rounds" for p in places],
            "error_y": {"type": "data", "array": errors, "thickness": 1, "width": 3, "color": color},
        }
        traces.append(trace)
    return traces


def _weights(run: Run, records: Sequence[RoundRecord], max_points: int) -> list[Choice]:
    weighted = [record for record in records if record.weights]
    # The log form weighs all alike: nothing to see.
    if not any(len({w for w in record.weights if w}) > 1 for record in weighted):
        return []
    size = max(1, math.ceil(len(weighted) * len(weighted[0].weights) / (4 * max_points)))
    weighted = weighted[::size]
    choices = []
    for name in [*explored(run)[:4], None]:
        slots = by_replica(weighted, "weights") if name is None else by_slot(weighted, "weights", name)
        rows = [f"{r}" if name is None else f"{slot.position:+.2f}" for r, slot in enumerate(slots)]
        if len(set(rows)) < len(rows):  # places that share a position
            rows = [f"{row} ({r})" for r, row in enumerate(rows)]
        bar = {"thickness": 10, "outlinewidth": 0, "title": {"text": "weight"}, "tickcolor": "--rule"}
        heat: Trace = {
            "type": "heatmap",
            "x": [record.step for record in weighted],
            "y": rows,
            "z": [slot.values for slot in slots],
            "colorscale": [[0, "--heat-low"], [0.5, "--heat-mid"], [1, "--heat-high"]],
            "zmin": 0,
            "colorbar": bar,
            "hovertemplate": "step %{x:,}<br>%{y}<br>weight %{z:.4~g}<extra></extra>",
        }
        said = ("replica", "replica") if name is None else (f"position of {name}", "position in the spread")
        choices.append(Choice(said[0], [heat], said[1]))
    return choices


def _cost(bars: Sequence[Sequence[RoundRecord]]) -> list[Trace]:
    """What a sync was spent on, as means over the records of each bar."""
    named = (name for bar in bars for record in bar for name in record.milliseconds)
    traces = []
    for index, name in enumerate(_PHASE_COLORS | dict.fromkeys(named)):
        heights = [sum(r.milliseconds.get(name, 0.0) for r in bar) / len(bar) for bar in bars]
        if any(heights):
            color = f"--series-{_PHASE_COLORS.get(name, index % 8 + 1)}"
            trace = {"type": "bar", "name": name, "x": [bar[-1].step for bar in bars], "y": heights}
            traces.append(trace | {"marker": {"color": color}, "hovertemplate": "%{y:.3~g} ms"})
    return traces


def _left_out(run: Run) -> list[Trace]:
    """Marks for the replicas that did not count, and for those that had losses that were not finite."""
    counts = [
        (record.step, replica, f"{count} losses were not finite" if count > 1 else "one loss was not finite")
        for record in run.records
        for replica, count in enumerate(record.num_nonfinite_losses)
        if count and replica not in record.excluded
    ]
    traces = []
    for events, name, symbol, color in (
        (run.excluded_events[:_MAX_MARKS], "left out of the mean", "x", "--alarm"),
        (counts[:_MAX_MARKS], "losses not finite", "circle-open", "--replica"),
    ):
        if events:
            steps, replicas, reasons = zip(*events, strict=True)
            hover = "replica %{y}<br>step %{x:,}<br>%{customdata}<extra></extra>"
            marker = {"color": color, "size": 10, "symbol": symbol}
            trace = line(steps, replicas, name, color, mode="markers", marker=marker, hovertemplate=hover)
            traces.append(trace | {"customdata": list(reasons)})
    return traces

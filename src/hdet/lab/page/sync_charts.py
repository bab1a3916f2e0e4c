"""Charts of the syncs: what the controller saw and made of it, what they cost, and who was left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hdet.lab.page.chart import Chart, Trace, curve, line, series_color, unzip
from hdet.lab.page.read_runs import Run
from hdet.lab.page.replica_lines import weight_choices
from hdet.lab.page.run_numbers import across_spread, differences_from_mean, explored, families
from hdet.records import RoundRecord

_MAX_BARS = 240
_MAX_MARKS = 2000
_PHASE_COLORS = {"probe": 1, "measure": 5, "converge": 4, "steer": 3}


def controller_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """Draw what the controller saw and what it made of it."""
    records = [record for record in run.records if record.ends_round]
    corrections = _by_name(records, "correction", max_points)
    # The paper's form holds the base itself: against a plan that falls to zero, its factor says nothing.
    is_factor = run.config.get("controller") != "paper" and run.compares
    if is_factor and any(abs(v - 1) > 1e-9 for trace in corrections for v in trace["y"]):
        caption = "The factor that the controller puts on the plan. Above one it asks for more than the "
        caption += "plan. A level line means that it has settled."
        style = {"hover": "x unified", "is_log": True, "max_decades": 3}
        yield Chart("Correction", caption, corrections, "base / planned value", **style)
    names = dict.fromkeys(name for record in records for name in (*record.signal, *record.velocity))
    for family, members in families(names).items():
        traces = _by_name(records, "signal", max_points, members)
        for trace in traces:
            marker = {"color": trace["line"]["color"], "size": 5, "opacity": 0.45}
            trace |= {"mode": "markers", "marker": marker}
        traces += _by_name(records, "velocity", max_points, members)
        if any(v for trace in traces for v in trace["y"]):
            caption = "Each dot says which way the replicas' losses pointed in a round. The line is their "
            caption += "running mean. Above zero means towards larger values. "
            caption += "Dots on both sides alike are noise."
            yield Chart(f"Signal and velocity: {family}", caption, traces, "direction")
    advantage = _advantage(run, records)
    if advantage:
        caption = "Loss at each place of the spread minus the mean of its round, over all rounds, with two "
        caption += "standard errors. A slope shows which side did better within a round. Short rounds favour "
        caption += "small learning rates, so this is not always better in the long run."
        yield Chart("Loss across the spread", caption, advantage, "loss difference", "factor on the base")
    weights = weight_choices(run, records, max_points)
    if weights:
        rows = len(weights[0].traces[0]["y"])
        caption = "How much each replica counted in each round (eq. 4 of the paper). The controller moves to "
        caption += "the side of the strong rows."
        axis = {"type": "category", "dtick": math.ceil(rows / 32), "tickmode": "linear"}
        style = {"height": 150 + 18 * min(32, rows), "choice_label": "Rows", "layout": {"yaxis": axis}}
        yield Chart("Weights of the replicas", caption, is_wide=True, choices=weights, **style)


def health_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """Draw what the syncs cost, and which replicas were left out."""
    timed = [record for record in run.records if record.milliseconds]
    size = max(1, math.ceil(len(timed) / _MAX_BARS))
    cost = _cost([timed[i : i + size] for i in range(0, len(timed), size)])
    if cost:
        each = "every sync" if size == 1 else f"a sync, as means over {size} of them"
        caption = f"Time on the host for {each}, by what it was spent on. The first sync also sets up "
        caption += "buffers. A rising trend is worth a look."
        # A few ticks, with the first and the last: a category axis would leave out the last.
        steps = cost[0]["x"]
        ticks = sorted({round(i * (len(steps) - 1) / 5) for i in range(6)})
        axis = {"type": "category", "tickmode": "array", "tickvals": [steps[i] for i in ticks]}
        layout = {"barmode": "stack", "bargap": 0.15, "xaxis": axis}
        style = {"hover": "x unified", "height": 280, "layout": layout}
        yield Chart("Cost of the syncs", caption, cost, "milliseconds", **style)
    left_out = _left_out(run)
    if left_out:
        caption = "Each mark is a sync in which a replica did not count, or had losses that were not finite. "
        caption += "Marks in one row point at one worker. Marks in one column point at the step."
        known = [r + 1 for _, r, _ in run.excluded_events] + [len(record.losses) for record in run.records]
        axis = {"range": [max(known) - 0.5, -0.5], "dtick": max(1, max(known) // 8), "tick0": 0}
        layout = {"xaxis": {"range": [0, 1.03 * run.last_step]}, "yaxis": axis}
        style = {"height": 280, "is_table_of_points": True, "layout": layout}
        yield Chart("Replicas left out", caption, left_out, "replica", **style)


def _by_name(
    records: Sequence[RoundRecord], field: str, max_points: int, names: Sequence[str] = ()
) -> list[Trace]:
    """A line per name in a field of the records; of some names, each says the field too."""
    rows = [(record.step, getattr(record, field)) for record in records]
    shown = names or list(dict.fromkeys(name for _, row in rows for name in row))
    traces = []
    for index, name in enumerate(shown):
        points = [(step, row[name]) for step, row in rows if name in row]
        color, label = series_color(index, len(shown)), f"{name}, {field}" if names else name
        traces += curve(*unzip(points), label, color, max_points // 2, legendgroup=name)
    return traces


def _advantage(run: Run, records: Sequence[RoundRecord]) -> list[Trace]:
    """For every place in the spread: its factor, and its loss against the mean of the round."""
    traces, differences = [], differences_from_mean(records)
    hover = "%{fullData.name}<br>factor %{x:.4~g}<br>%{y:+.3~g} %{customdata}<extra></extra>"
    for index, name in enumerate(explored(run)):
        places = [place for place in across_spread(records, differences, name) if place.num_rounds > 2]
        if len(places) < 2:
            continue
        color, _ = series_color(index)
        errors = [2 * place.error for place in places]
        bars = {"type": "data", "array": errors, "thickness": 1, "width": 3, "color": color}
        said = [f"± {2 * place.error:.3g}, over {place.num_rounds} rounds" for place in places]
        style = {"mode": "lines+markers", "marker": {"size": 7}, "hovertemplate": hover, "customdata": said}
        x, y = [place.factor for place in places], [place.mean for place in places]
        traces.append(line(x, y, name, color, error_y=bars, **style))
    return traces


def _cost(bars: Sequence[Sequence[RoundRecord]]) -> list[Trace]:
    """The parts of a sync's time, as means over the records of each bar."""
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

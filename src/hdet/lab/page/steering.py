"""Charts of the hyperparameters and of the controller that moves them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hdet.lab.page.chart import Chart, Choice, Trace, line, series_color, spread_color
from hdet.lab.page.facts import compares
from hdet.lab.page.runs import Run
from hdet.lab.page.schedules import planned, schedule, schedules
from hdet.lab.page.series import (
    across_spread,
    base_series,
    by_replica,
    by_slot,
    differences_from_mean,
    explored,
    families,
    fan_limits,
    thin,
)
from hdet.records import RoundRecord
from hdet.round_record import is_learning_rate


def hyperparameter_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """What differed between replicas, and the schedules of everything else but the learning rate."""
    names = [name for name in explored(run) if base_series(run, name)[0]]
    if names:
        yield Chart(
            title="Values and their spread",
            caption="The strong line is the shared value. The band reaches from the lowest replica to the "
            "highest. Dots are the replicas at the end of each round. A dotted line is the plan.",
            is_log=True,
            max_decades=3,
            height=380,
            choices=[Choice(name, _fan(run, name, max_points), y_title=name) for name in names],
            choice_label="Show",
            has_spread_key=True,
        )
    named = dict.fromkeys(name for record in run.records for name in (*record.base, *record.base_trace))
    others = [name for name in named if not is_learning_rate(name)]
    for family, members in families(others).items():
        traces = schedules(run, members, family, max_points)
        if any(len(set(trace["y"])) > 1 for trace in traces) and (
            len(members) > 1 or members[0] not in names
        ):
            yield Chart(
                title=f"Schedule: {family}",
                caption="The shared value over the run. A dotted line is the plan. Groups with equal values "
                "share a line.",
                traces=traces,
                y_title=family,
                hover="x unified",
                is_wide=False,
                is_log=True,
                max_decades=3,
            )


def controller_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """What the controller saw and what it made of it."""
    records = [record for record in run.records if record.ends_round]
    corrections = _by_name(records, "correction", max_points)
    # The paper's form holds the base itself: against a plan that falls to zero, its factor says nothing.
    is_factor = run.config.get("controller") != "paper" and compares(run)
    if is_factor and any(abs(v - 1) > 1e-9 for trace in corrections for v in trace["y"]):
        yield Chart(
            title="Correction",
            caption="The factor that the controller puts on the plan. Above one it asks for more than the "
            "plan. A level line means that it has settled.",
            traces=corrections,
            y_title="base / planned value",
            hover="x unified",
            is_wide=False,
            is_log=True,
            max_decades=3,
        )
    names = dict.fromkeys(name for record in records for name in (*record.signal, *record.velocity))
    for family, members in families(list(names)).items():
        signals = _by_name(records, "signal", max_points, members)
        for trace in signals:
            trace |= {
                "mode": "markers",
                "marker": {"color": trace["line"]["color"], "size": 5, "opacity": 0.45},
            }
            trace["name"] += ", signal"
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
                is_wide=False,
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
            is_wide=False,
            is_table_of_points=True,
        )
    weights = _weights(run, records, max_points)
    if weights:
        rows = len(weights[0].traces[0]["y"])
        yield Chart(
            title="Weights of the replicas",
            caption="How much each replica counted in each round (eq. 4 of the paper). The controller moves "
            "to the side of the strong rows.",
            y_title="",
            height=150 + 18 * min(32, rows),
            choices=weights,
            choice_label="Rows",
            layout={"yaxis": {"type": "category", "dtick": math.ceil(rows / 32), "tickmode": "linear"}},
        )


def _fan(run: Run, name: str, max_points: int) -> list[Trace]:
    traces = _band(run, name, max_points) if name in explored(run) else []
    traces += planned(run, name, max_points, "--muted", "planned")
    base = schedule(run, name, max_points, color="--strong", label="base", width=3)
    return [*traces, base] if base["x"] else traces


def _band(run: Run, name: str, max_points: int) -> list[Trace]:
    steps, low, high = fan_limits(run, name)
    kept = thin([low, high], max_points // 2)
    x = [steps[i] for i in kept]
    common = {"legendgroup": "band", "showlegend": False}
    edge = {"width": 0, "hoverinfo": "skip", "hovertemplate": None, **common}
    bottom = line(x, [low[i] for i in kept], "lowest replica", "--band", **edge)
    top = line(x, [high[i] for i in kept], "highest replica", "--band", **edge)
    traces = [bottom, {**top, "fill": "tonexty", "fillcolor": "--band"}]
    records = [record for record in run.records if record.ends_round and name in record.values]
    slots = by_slot(records, "values", name) if max_points >= 120 else []
    slots = slots if len(slots) <= 16 else []  # the band says enough
    size = max(1, math.ceil(len(records) * len(slots) / (max_points // 2)))
    x = [record.step for record in records[::size]]
    for slot in slots:
        color = spread_color(slot.position)
        dots = line(x, slot.values[::size], f"replica at {slot.position:+.2f}", color, **common)
        dots |= {"mode": "markers", "marker": {"color": color, "size": 4.5}}
        dots |= {"customdata": slot.replicas[::size]}
        dots["hovertemplate"] = "replica %{customdata}<br>step %{x:,}<br>%{y:.6~g}<extra></extra>"
        traces.append(dots)
    entry = line([None], [None], "replicas", "--band", width=8, legendgroup="band")
    return [*traces, {**entry, "hoverinfo": "skip", "meta": ["", "legend"]}]


def _by_name(
    records: Sequence[RoundRecord], field: str, max_points: int, names: Sequence[str] | None = None
) -> list[Trace]:
    if names is None:
        names = list(dict.fromkeys(name for record in records for name in getattr(record, field)))
    traces = []
    for index, name in enumerate(names):
        points = [(r.step, getattr(r, field)[name]) for r in records if name in getattr(r, field)]
        kept = thin([[v for _, v in points]], max_points // 2)
        color, dash = series_color(index) if len(names) > 1 else ("--accent", "solid")
        x, y = [points[i][0] for i in kept], [points[i][1] for i in kept]
        if kept:
            traces.append(line(x, y, name, color, dash=dash, legendgroup=name))
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
        template = "%{fullData.name}<br>factor %{x:.4~g}<br>%{y:+.3~g} %{customdata}<extra></extra>"
        trace = line([p.factor for p in places], [p.mean for p in places], name, color)
        trace |= {"mode": "lines+markers", "marker": {"size": 7}, "hovertemplate": template}
        trace["customdata"] = [f"± {2 * p.error:.3g}, over {p.num_rounds} rounds" for p in places]
        errors = [2 * p.error for p in places]
        trace["error_y"] = {"type": "data", "array": errors, "thickness": 1, "width": 3, "color": color}
        traces.append(trace)
    return traces


def _weights(run: Run, records: Sequence[RoundRecord], max_points: int) -> list[Choice]:
    weighted = [record for record in records if record.weights]
    # The log form weighs all alike: nothing to see.
    if not any(len({w for w in record.weights if w}) > 1 for record in weighted):
        return []
    size = max(1, math.ceil(len(weighted) * len(weighted[0].weights) / (4 * max_points)))
    weighted = weighted[::size]
    steps = [record.step for record in weighted]
    choices = []
    for name in [*explored(run)[:4], None]:
        slots = by_replica(weighted, "weights") if name is None else by_slot(weighted, "weights", name)
        rows = [f"{r}" if name is None else f"{slot.position:+.2f}" for r, slot in enumerate(slots)]
        if len(set(rows)) < len(rows):  # places that share a position
            rows = [f"{row} ({r})" for r, row in enumerate(rows)]
        heat: Trace = {
            "type": "heatmap",
            "x": steps,
            "y": rows,
            "z": [slot.values for slot in slots],
            "colorscale": [[0, "--heat-low"], [0.5, "--heat-mid"], [1, "--heat-high"]],
            "zmin": 0,
            "colorbar": {
                "thickness": 10,
                "outlinewidth": 0,
                "title": {"text": "weight"},
                "tickcolor": "--rule",
            },
            "hovertemplate": "step %{x:,}<br>%{y}<br>weight %{z:.4~g}<extra></extra>",
        }
        label, y_title = f"position of {name}", "position in the spread"
        choices.append(
            Choice("replica", [heat], "replica") if name is None else Choice(label, [heat], y_title)
        )
    return choices

"""Charts of the replicas and their syncs: losses and weights, the controller, cost, and who was left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hdet.lab.page.chart import Chart, Trace, curve, line, series_color, thin, unzip
from hdet.lab.page.read_runs import Run, loss_title
from hdet.lab.page.run_numbers import Slot, across_spread, by_slot, differences_from_mean, explored, families
from hdet.records import RoundRecord

_MAX_CHOICES = 6
_MAX_LINES = 16
_MAX_BARS = 240
_MAX_MARKS = 2000
_PHASE_COLORS = {"probe": 1, "measure": 5, "converge": 4, "steer": 3}
_OF_EACH = {
    "losses": ("Losses of the replicas", "training loss", "The mean of each round, on a replica's own data."),
    "probes": (
        "Losses on the probe",
        "probe loss",
        "On one batch, the same for every replica, just before they are averaged.",
    ),
    "weights": ("Weights of the replicas", "weight", "How much each counted for the controller (eq. 4)."),
}
"""Title, name and caption of the charts that have a line per replica, by field of the record."""


def replica_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """Draw losses and weights of every replica, where something differed between them."""
    names = explored(run)
    for field, (title, what, caption) in _OF_EACH.items() if names else ():
        records = [record for record in run.records if len({*getattr(record, field)} - {None}) > 1]
        is_loss = what != "weight"
        choices = _choices(records, field, names, what, run.loss_unit * is_loss, max_points)
        style = {"is_wide": True, "is_log": False if is_loss else None, "choices": choices}
        y_title = loss_title(run.loss_unit) if is_loss else what
        if records:
            caption += " Look for a colour that stays on one side of the others."
            yield Chart(title, caption, y_title=y_title, **style)


def _choices(
    records: Sequence[RoundRecord], field: str, names: Sequence[str], what: str, unit: str, max_points: int
) -> dict[str, list[Trace]]:
    """Lines by place in the spread of each hyperparameter, and by replica."""
    columns = [slot.values for slot in by_slot(records, field, None)]
    names = names[: 1 if len(columns) > _MAX_LINES or max_points < 250 else _MAX_CHOICES]
    # Numbers on the page: replicas x rounds x choices. Lines of many replicas need fewer points each.
    num_lines = max(1, min(_MAX_LINES, len(columns))) * (len(names) + 1)
    records = [records[i] for i in thin(columns, min(max_points, max(40, 6 * max_points // num_lines)))]
    steps = [record.step for record in records]
    places = {f"position of {name}": by_slot(records, field, name) for name in names}
    places["replica"] = by_slot(records, field, None)
    return {label: _lines(steps, slots, what, unit) for label, slots in places.items()}


def _lines(x: Sequence[int], slots: Sequence[Slot], what: str, unit: str) -> list[Trace]:
    """A line per slot, or some of them if there are many."""
    traces, last, num_drawn = [], len(slots) - 1, min(len(slots), _MAX_LINES)
    for k in sorted({round(i * last / max(1, num_drawn - 1)) for i in range(num_drawn)}):
        position, values = slots[k]
        name = f"replica {k}" if position is None else f"{what}, position {position:+.2f}"
        # Without a place in the spread, the colour of any replica.
        color = "--replica" if position is None else f"--spread {max(-1.0, min(1.0, position)):.3g}"
        style = {"mode": "lines" if len(x) > 1 else "markers", "marker": {"color": color}, "unit": unit}
        more = {"legendgroup": "replicas", "showlegend": False}
        traces.append(line(x, values, name, color, width=1.2, **style, **more))
    # One entry in the legend, which switches them all.
    label = f"{num_drawn} of {len(slots)} replicas" if len(slots) > num_drawn else "replicas"
    more = {"legendgroup": "replicas", "hoverinfo": "skip", "meta": ["", "legend"]}
    return [*traces, line([None], [None], label, "--replica", width=1.5, **more)]


def controller_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """Draw what the replicas' losses said across the spread, and what the controller made of it."""
    records = [record for record in run.records if record.ends_round]
    advantage = _advantage(run, records)
    if advantage:
        caption = "Loss at each place of the spread minus the mean of its round, over all rounds, with two "
        caption += "standard errors. A slope shows which side did better within a round. Short rounds favour "
        caption += "small learning rates, so this is not always better in the long run."
        yield Chart("Loss across the spread", caption, advantage, "loss difference", "factor on the base")
    names = dict.fromkeys(name for record in records for name in (*record.signal, *record.velocity))
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
        caption += "Marks in one row point at one worker. Marks in one column point at the step."
        known = [r + 1 for _, r, _ in run.excluded_events] + [len(record.losses) for record in run.records]
        axis = {"range": [max(known) - 0.5, -0.5], "dtick": max(1, max(known) // 8), "tick0": 0}
        layout = {"xaxis": {"range": [0, 1.03 * run.last_step]}, "yaxis": axis}
        style = {"height": 280, "is_table_of_points": True, "layout": layout}
        yield Chart("Replicas left out", caption, left_out, "replica", **style)


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

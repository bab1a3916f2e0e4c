"""Traces of every replica, to choose from: its values, losses and weights, by place in the spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hdet.lab.page import run_numbers as numbers
from hdet.lab.page.chart import Choice, Numbers, Trace, curve, line, thin
from hdet.lab.page.read_runs import Run
from hdet.records import RoundRecord

_MAX_CHOICES = 6
_MAX_LINES = 16


def loss_choices(run: Run, field: str, max_points: int) -> list[Choice]:
    """The ``losses`` or ``probes`` of the replicas; their mean where nothing differed between them."""
    records = [record for record in run.records if any(v is not None for v in getattr(record, field))]
    names, unit = numbers.explored(run), run.loss_unit
    what = "probe loss" if field == "probes" else "training loss"
    if not names:  # replicas differ by noise only
        steps, means = [r.step for r in records], [numbers.mean(getattr(r, field)) for r in records]
        mean = curve(steps, means, what, "--accent", max_points, width=2.2, unit=unit)
        return [Choice("mean", mean)] if mean else []
    columns = [slot.values for slot in numbers.by_slot(records, field, None)]
    names = names[: 1 if len(columns) > _MAX_LINES or max_points < 250 else _MAX_CHOICES]
    # Numbers on the page: replicas x rounds x choices. Lines of many replicas need fewer points each.
    num_lines = max(1, min(_MAX_LINES, len(columns))) * (len(names) + 1)
    kept = thin(columns, min(max_points, max(40, 6 * max_points // num_lines)))
    records = [records[i] for i in kept]
    steps = [record.step for record in records]
    slots = {name: numbers.by_slot(records, field, name) for name in [*names, None]}
    return [Choice(_label(name), _lines(steps, slots[name], what, unit)) for name in slots if records]


def weight_choices(run: Run, records: Sequence[RoundRecord], max_points: int) -> list[Choice]:
    """The weights of the replicas in each round, as colours; nothing where all weigh alike."""
    weighted = [record for record in records if record.weights]
    if not any(len({w for w in record.weights if w}) > 1 for record in weighted):
        return []  # as in the log form
    weighted = weighted[:: _stride(len(weighted) * len(weighted[0].weights), 4 * max_points)]
    choices = []
    for name in [*numbers.explored(run)[:4], None]:
        slots = numbers.by_slot(weighted, "weights", name)
        rows = [f"{r}" if slot.position is None else f"{slot.position:+.2f}" for r, slot in enumerate(slots)]
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
        choices.append(Choice(_label(name), [heat], "replica" if name is None else "position in the spread"))
    return choices


def values_around(run: Run, name: str, max_points: int) -> list[Trace]:
    """The values of the replicas around the base of a hyperparameter: a band, and dots where they are few."""
    steps, low, high = numbers.fan_limits(run, name)
    kept = thin([low, high], max_points // 2)
    ends = [low[i] for i in kept], [high[i] for i in kept]
    traces = _band([steps[i] for i in kept], *ends, ("lowest replica", "highest replica"), "band")
    records = [record for record in run.records if record.ends_round and name in record.values]
    slots = numbers.by_slot(records, "values", name) if max_points >= 120 else []
    slots = slots if len(slots) <= _MAX_LINES else []  # the band says enough
    size = _stride(len(records) * len(slots), max_points // 2)
    x = [record.step for record in records[::size]]
    hover = "replica %{customdata}<br>step %{x:,}<br>%{y:.6~g}<extra></extra>"
    for position, values, replicas in slots:
        color = _spread_color(position)
        dots = {"mode": "markers", "marker": {"color": color, "size": 4.5}, "hovertemplate": hover}
        more = {"legendgroup": "band", "showlegend": False, "customdata": replicas[::size]}
        traces.append(line(x, values[::size], f"replica at {position:+.2f}", color, **dots, **more))
    return [*traces, _legend_entry("replicas", "--band", "band", 8)]


def _lines(x: Sequence[int], slots: Sequence[numbers.Slot], what: str, unit: str) -> list[Trace]:
    """A line per slot, or a band and some of the lines if there are many."""
    traces, label = [], f"{what} of the replicas"
    last, num_drawn = len(slots) - 1, min(len(slots), _MAX_LINES)
    if last >= num_drawn:
        rows = [[v for slot in slots if (v := slot.values[i]) is not None] for i in range(len(x))]
        ends = [min(row, default=None) for row in rows], [max(row, default=None) for row in rows]
        traces = _band(x, *ends, ("lowest of all", "highest of all"), "replicas")
        label += f" ({num_drawn} of {len(slots)})"
    for k in sorted({round(i * last / max(1, num_drawn - 1)) for i in range(num_drawn)}):
        position, values, replicas = slots[k]
        name = f"replica {k}" if position is None else f"{what}, position {position:+.2f}"
        color = _spread_color(position)
        trace = line(x, values, name, color, width=1.2, unit=unit, legendgroup="replicas", showlegend=False)
        if len(x) == 1:
            trace |= {"mode": "markers", "marker": {"color": color, "size": 7}}
        if position is not None:
            hover = trace["hovertemplate"].replace("<extra>", "<br>replica %{customdata}<extra>")
            trace |= {"customdata": replicas, "hovertemplate": hover}
        traces.append(trace)
    return [*traces, _legend_entry(label, "--replica", "replicas", 1.5)]


def _band(x: Sequence[int], low: Numbers, high: Numbers, names: tuple[str, str], group: str) -> list[Trace]:
    """Two edges and what is between them, without an entry in the legend."""
    style: dict[str, Any] = {"width": 0, "legendgroup": group, "showlegend": False}
    style |= {"hoverinfo": "skip", "hovertemplate": None}
    bottom, top = (line(x, y, name, "--band", **style) for y, name in zip((low, high), names, strict=True))
    return [bottom, top | {"fill": "tonexty", "fillcolor": "--band"}]


def _legend_entry(label: str, color: str, group: str, width: float) -> Trace:
    """One entry in the legend, which switches all traces of a group."""
    more = {"legendgroup": group, "hoverinfo": "skip", "meta": ["", "legend"]}
    return line([None], [None], label, color, width=width, **more)


def _spread_color(position: float | None) -> str:
    """Colour of a position in the spread, from -1 to 1; without one, that of any replica."""
    return "--replica" if position is None else f"--spread {max(-1.0, min(1.0, position)):.3g}"


def _label(name: str | None) -> str:
    return "replica" if name is None else f"position of {name}"


def _stride(num_points: int, max_points: int) -> int:
    return max(1, math.ceil(num_points / max_points))

"""Chart: what the page draws, as plain data. Colours are names that the page's style sheet gives a value."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Trace = dict[str, Any]
Numbers = Sequence[float | None]
Color = str | tuple[str, str]
"""Its name in the style sheet, alone or with a dash."""

STEPS = "optimizer step"
"""The title of the axis of most charts."""
_NUM_SERIES_COLORS = 8
_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass
class Chart:
    """One figure of the page; one without points is left out there."""

    title: str
    caption: str
    traces: list[Trace] = field(default_factory=list)
    y_title: str = ""
    x_title: str = STEPS
    hover: str = "closest"
    height: int = 320
    is_wide: bool = False
    is_log: bool | None = None
    """Begin with a logarithmic vertical axis; None if there is nothing to switch."""
    max_decades: float = 0
    """Decades that a logarithmic axis reaches down from the top at first; 0 for all the way."""
    layout: dict[str, Any] = field(default_factory=dict)

    def data(self, max_points: int, num_steps: int = 0) -> dict[str, Any]:
        """Give what the page's script reads, safe to draw, with at most so many points per line.

        An axis of steps reaches to ``num_steps``, if that is known.
        """
        has_steps = self.x_title == STEPS
        found = vars(self) | {
            "traces": _thinned([trace for trace in self.traces if trace["x"]], max_points),
            "num_steps": num_steps if has_steps else 0,
            # Numbers are listed by step, or point by point.
            "points": not has_steps or any("customdata" in trace for trace in self.traces),
        }
        return _cleaned(found)


def line(
    x: Sequence[Any], y: Numbers, name: str, color: Color, *, unit: str = "", width: float = 2, **more: Any
) -> Trace:
    """A line with hover text, in which the unit follows the value.

    ``more`` has further fields of the trace, and other values for those that a line has. The second entry of
    ``meta`` is ``mark`` for what has no numbers of its own, and ``aside`` for what the axis need not reach.
    """
    color, dash = (color, "solid") if isinstance(color, str) else color
    hover = "%{fullData.name}<br>step %{x:,}<br>%{y:.6~g} %{meta[0]}<extra></extra>"
    style = {"color": color, "width": width, "dash": dash}
    trace = {"type": "scatter", "mode": "lines", "x": x, "y": y, "name": short(name), "line": style}
    return trace | {"meta": [unit], "hovertemplate": hover} | more


def dots(points: Sequence[Any], name: str, color: str, symbol: str = "circle", **more: Any) -> Trace:
    """Marks at points of place and height, and of what is said of each; ``more`` is that of :func:`line`."""
    x, y, *said = ([point[i] for point in points] for i in range(len(points[0]) if points else 2))
    style: Trace = {"mode": "markers", "marker": {"size": 8, "symbol": symbol, "color": color}}
    return line(x, y, name, color) | style | ({"customdata": said[0]} if said else {}) | more


def estimates(points: Sequence[tuple[float, float, float]], name: str, color: str) -> Trace:
    """Marks at points of place, height and standard error, with bars of two standard errors."""
    errors = [2 * error for *_, error in points]
    bars = {"type": "data", "array": errors, "thickness": 1, "width": 3, "color": color}
    hover = "%{fullData.name}<br>at %{x:.6~g}<br>%{y:+.3~g} %{customdata}<extra></extra>"
    said = [(x, y, f"± {2 * error:.3g}") for x, y, error in points]
    return dots(said, name, color, error_y=bars, hovertemplate=hover)


def band(x: Sequence[Any], low: Numbers, high: Numbers, name: str, **more: Any) -> list[Trace]:
    """Two edges and what is between them, with one entry in the legend."""
    more = {"legendgroup": name, "hoverinfo": "skip", "hovertemplate": None, **more}
    bottom, top = (line(x, y, label, "--band", width=0, **more) for y, label in ((low, ""), (high, name)))
    bottom |= {"name": f"{name}, lowest", "showlegend": False}
    top |= {"fill": "tonexty", "fillcolor": "--band"}
    return [bottom, top]


def series_color(index: int, num_series: int = 2) -> tuple[str, str]:
    """Colour and dash of one of several equal series; dashes tell apart what shares a colour.

    >>> series_color(0), series_color(9), series_color(0, num_series=1)
    (('--series-1', 'solid'), ('--series-2', 'dash'), ('--accent', 'solid'))
    """
    turn, place = divmod(index, _NUM_SERIES_COLORS)
    color = "--accent" if num_series == 1 else f"--series-{place + 1}"
    return color, _DASHES[turn % len(_DASHES)]


def short(text: str, length: int = 48) -> str:
    """The text, cut in the middle where it is too long for a legend.

    >>> short("a" * 30 + "b" * 30, 11)
    'aaaaa…bbbbb'
    """
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


def thin(columns: Sequence[Numbers], max_points: int) -> list[int]:
    """Indices of the rows to keep: the ends, and from each stretch the rows of its extremes.

    >>> thin([[0, 1, 9, 1, 0, 1, -9, 1, 0, 0]], 6)
    [0, 2, 5, 6, 9]
    >>> thin([[1, 2, 3]], 6)
    [0, 1, 2]
    """
    length = max((len(column) for column in columns), default=0)
    if length <= max_points:
        return list(range(length))
    num_stretches, kept = max(1, (max_points - 2) // 2), {0, length - 1}
    for i in range(num_stretches):
        rows = range(i * length // num_stretches, (i + 1) * length // num_stretches)
        pairs = ((column[row], row) for column in columns for row in rows)
        known = [(value, row) for value, row in pairs if value is not None and math.isfinite(value)]
        # Of equal ones, the first.
        kept |= {min(known)[1], max(known, key=lambda pair: pair[0])[1]} if known else {rows[0]}
    return sorted(kept)


def _thinned(traces: Sequence[Trace], max_points: int) -> list[Trace]:
    """Keep the points that matter; lines over the same steps keep the same, so that they can be stacked."""
    columns = dict[Any, list[Numbers]]()
    for trace in traces:
        columns.setdefault(tuple(trace["x"]), []).append(trace["y"])
    rows = {x: thin(lines, max_points) for x, lines in columns.items()}
    return [_rows_of(trace, rows[tuple(trace["x"])], len(trace["x"])) for trace in traces]


def _rows_of(value: Any, rows: list[int], length: int) -> Any:
    """The rows of every list that has an entry per point, however deep it lies."""
    if isinstance(value, dict):
        return {name: _rows_of(entry, rows, length) for name, entry in value.items()}
    return [value[i] for i in rows] if isinstance(value, list | range) and len(value) == length else value


def _cleaned(value: Any, key: str = "") -> Any:
    """Numbers as JSON has them, and text that Plotly draws as it is.

    It takes text for a subset of HTML, with links, and ``%{x}`` for a variable; entities stay text.
    """
    if isinstance(value, dict):
        return {name: _cleaned(entry, name) for name, entry in value.items()}
    if isinstance(value, str):
        return value if key == "hovertemplate" else html.escape(value, quote=False).replace("%{", "&#37;{")
    if isinstance(value, list | tuple | range):
        return [_cleaned(entry, key) for entry in value]
    if not isinstance(value, float):
        return value
    rounded = float(f"{value:.6g}")
    if not math.isfinite(rounded):
        return None
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded

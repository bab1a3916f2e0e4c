"""Chart: what the page draws, as plain data. Colours are names that the page's style sheet gives a value."""

from __future__ import annotations

import html
import json
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
    """One figure of the page. Empty ones are left out by whoever collects them."""

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
    is_table_of_points: bool = False
    """List the numbers point by point, as is done without steps, rather than by step."""
    layout: dict[str, Any] = field(default_factory=dict)

    def data(self, num_steps: int = 0) -> dict[str, Any]:
        """Give what the page's script reads; an axis of steps reaches to ``num_steps``, if that is known."""
        has_steps = self.x_title == STEPS
        return vars(self) | {
            "num_steps": num_steps if has_steps else 0,
            "points": self.is_table_of_points or not has_steps,
        }


def line(
    x: Sequence[Any], y: Numbers, name: str, color: Color, *, unit: str = "", width: float = 2, **more: Any
) -> Trace:
    """A line with hover text, in which the unit follows the value.

    ``more`` has further fields of the trace, and other values for those that a line has. The second entry of
    ``meta`` is ``legend`` for what is there for the legend only, ``mark`` for what has no numbers of its own,
    and ``aside`` for what the axis need not reach.
    """
    color, dash = (color, "solid") if isinstance(color, str) else color
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "name": short(name),
        "line": {"color": color, "width": width} | ({} if dash == "solid" else {"dash": dash}),
        "meta": [unit],
        "hovertemplate": "%{fullData.name}<br>step %{x:,}<br>%{y:.6~g} %{meta[0]}<extra></extra>",
        **more,
    }


def curve(x: Sequence[int], y: Numbers, name: str, color: Color, max_points: int, **more: Any) -> list[Trace]:
    """A line through the points that matter, where there are too many; no line without points."""
    kept = thin([y], max_points)
    return [line([x[i] for i in kept], [y[i] for i in kept], name, color, **more)] if kept else []


def band(x: Sequence[Any], low: Numbers, high: Numbers, name: str, **more: Any) -> list[Trace]:
    """Two edges and what is between them, with one entry in the legend; nothing without points."""
    more = {"legendgroup": name, "hoverinfo": "skip", "hovertemplate": None, **more}
    bottom, top = (line(x, y, label, "--band", width=0, **more) for y, label in ((low, ""), (high, name)))
    bottom |= {"name": f"{name}, lowest", "showlegend": False}
    top |= {"fill": "tonexty", "fillcolor": "--band"}
    return [bottom, top] if x else []


def unzip(points: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """The places and the heights of points.

    >>> unzip([(1, 0.5), (2, 0.4)])
    ([1, 2], [0.5, 0.4])
    """
    return [x for x, _ in points], [y for _, y in points]


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
    num_stretches = max(1, (max_points - 2) // 2)
    kept = {0, length - 1}
    for i in range(num_stretches):
        start, stop = i * length // num_stretches, (i + 1) * length // num_stretches
        rows = [pair for column in columns for pair in enumerate(column[start:stop], start)]
        known = [(value, row) for row, value in rows if value is not None and math.isfinite(value)]
        # Of equal ones, the first.
        kept |= {min(known)[1], max(known, key=lambda pair: pair[0])[1]} if known else {start}
    return sorted(kept)


class Pool:
    """Writes once what traces share: a list, or a long text, becomes its place in the pool."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}

    def add(self, chart: Chart, num_steps: int = 0) -> Any:
        """The data of a chart, safe to draw, with its long lists in the pool."""
        return self._walk(chart.data(num_steps))

    @property
    def texts(self) -> list[str]:
        """List the entries of the pool, as JSON."""
        return list(self._texts)

    def _walk(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: self._walk(entry, name) for name, entry in value.items()}
        if isinstance(value, float):
            return _rounded(value)
        if isinstance(value, str):
            text = value if key == "hovertemplate" else _without_markup(value)
            return self._place(text) if len(text) > 24 else text
        if isinstance(value, list | tuple):
            cleaned = [self._walk(entry, key) for entry in value]
            is_short = len(cleaned) < 6 or any(isinstance(entry, dict | list) for entry in cleaned)
            return cleaned if is_short else self._place(cleaned)
        return value

    def _place(self, value: Any) -> dict[str, int]:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
        return {"pool": self._texts.setdefault(text, len(self._texts))}


def embed(text: str) -> str:
    r"""JSON that can stand inside a script element: nothing in it can end the element.

    >>> print(embed('"</script>"'))
    "\u003c/script\u003e"
    """
    return text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"})


def _without_markup(text: str) -> str:
    """Plotly takes text for a subset of HTML, with links, and ``%{x}`` for a variable; entities stay text."""
    return html.escape(text, quote=False).replace("%{", "&#37;{")


def _rounded(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    value = float(f"{value:.6g}")
    return int(value) if value.is_integer() and abs(value) < 2**53 else value

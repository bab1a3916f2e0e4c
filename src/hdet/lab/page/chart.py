"""Chart: what the page draws, as plain data. Colours are names that the page's style sheet gives a value."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Trace = dict[str, Any]

STEPS = "optimizer step"
"""What the axis of most charts says."""
_NUM_SERIES_COLORS = 8
_PLAIN = (int, float, type(None))
_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass
class Choice:
    """One entry of a chart's selector: traces that are drawn beside the common ones."""

    label: str
    traces: list[Trace]
    y_title: str = ""


@dataclass
class Chart:
    """One figure of the page. Empty ones are left out by whoever collects them."""

    title: str
    caption: str
    traces: list[Trace] = field(default_factory=list)
    """Drawn whatever is chosen, on top of the chosen ones."""
    x_title: str = STEPS
    y_title: str = ""
    num_steps: int = 0
    """How far an axis of steps reaches, so that all charts of a run agree; 0 for as far as the data."""
    hover: str = "closest"
    height: int = 320
    is_wide: bool = True
    is_log: bool | None = None
    """How the vertical axis begins; None if there is nothing to switch."""
    max_decades: float = 0
    """How far a logarithmic axis reaches down from the top at first; 0 for all the way."""
    choices: list[Choice] = field(default_factory=list)
    choice_label: str = ""
    has_spread_key: bool = False
    """Whether colours stand for the position in the spread."""
    is_table_of_points: bool = False
    """Whether the numbers are listed point by point, rather than by step."""
    layout: dict[str, Any] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """What the page's script reads; titles and captions are in the page itself."""
        return {
            "traces": self.traces,
            "choices": [
                {"label": c.label, "traces": c.traces, "y_title": c.y_title or self.y_title}
                for c in self.choices
            ],
            "x_title": self.x_title,
            "y_title": self.y_title,
            "num_steps": self.num_steps if self.x_title == STEPS else 0,
            "hover": self.hover,
            "height": self.height,
            "is_log": self.is_log,
            "max_decades": self.max_decades,
            "points": self.is_table_of_points,
            "layout": self.layout,
        }


def line(x: Sequence[Any], y: Sequence[Any], name: str, color: str, **more: Any) -> Trace:
    """A line with hover text; ``unit`` follows the value there."""
    unit, width, dash = more.pop("unit", ""), more.pop("width", 2), more.pop("dash", "solid")
    template = "%{fullData.name}<br>step %{x:,}<br>%{y:.6~g} %{meta[0]}<extra></extra>"
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "name": short(name),
        "line": {"color": color, "width": width} | ({} if dash == "solid" else {"dash": dash}),
        "meta": [unit],
        "hovertemplate": template,
        **more,
    }


def series_color(index: int) -> tuple[str, str]:
    """Colour and dash of one of several equal series; dashes tell apart what shares a colour.

    >>> series_color(0), series_color(9)
    (('--series-1', 'solid'), ('--series-2', 'dash'))
    """
    turn, place = divmod(index, _NUM_SERIES_COLORS)
    return f"--series-{place + 1}", _DASHES[turn % len(_DASHES)]


def spread_color(position: float) -> str:
    """Colour of a position in the spread, from -1 to 1."""
    return f"--spread {max(-1.0, min(1.0, position)):.3g}"


def short(text: str, length: int = 48) -> str:
    """The text, cut in the middle where it is too long for a legend.

    >>> short("a" * 30 + "b" * 30, 11)
    'aaaaa…bbbbb'
    """
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


class Pool:
    """What several traces share is written once: a list, or a long text, becomes its place in the pool."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}

    def add(self, chart: Chart) -> Any:
        """The data of a chart, safe to draw, with its long lists in the pool."""
        return self._walk(chart.data(), "")

    @property
    def texts(self) -> list[str]:
        """What is in the pool, as JSON."""
        return list(self._texts)

    def _walk(self, value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: self._walk(entry, name) for name, entry in value.items()}
        if isinstance(value, list) and len(value) >= 6 and all(type(entry) in _PLAIN for entry in value):
            numbers = [_rounded(entry) if type(entry) is float else entry for entry in value]
            return self._place(json.dumps(numbers, separators=(",", ":"), allow_nan=False))
        if isinstance(value, list | tuple):
            cleaned = [self._walk(entry, key) for entry in value]
            if len(cleaned) < 6 or any(isinstance(entry, dict | list) for entry in cleaned):
                return cleaned
            return self._place(json.dumps(cleaned, separators=(",", ":")))
        if isinstance(value, str):
            if key == "label":  # the page sets it as text
                return value
            text = value if key == "hovertemplate" else _without_markup(value)
            return self._place(json.dumps(text)) if len(text) > 24 else text
        if isinstance(value, float):
            return _rounded(value)
        return value

    def _place(self, text: str) -> dict[str, int]:
        return {"pool": self._texts.setdefault(text, len(self._texts))}


def embed(text: str) -> str:
    r"""JSON that can stand inside a script element: nothing in it can end the element.

    >>> print(embed('"</script>"'))
    "\u003c/script\u003e"
    """
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _without_markup(text: str) -> str:
    """Plotly takes text for a subset of HTML, with links, and ``%{x}`` for a variable; entities stay text."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "&#37;{")


def _rounded(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    value = float(f"{value:.6g}")
    return int(value) if value.is_integer() and abs(value) < 2**53 else value

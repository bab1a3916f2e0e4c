"""A page as one file: text and charts in, HTML that asks for nothing else out.

Every text that comes from a run is escaped here.
"""

from __future__ import annotations

import functools
import html
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from hdet.errors import HdetError, install_command
from hdet.lab.page.chart import Chart
from hdet.lab.page.sentences import Tile, figure
from hdet.records import replacing

_MAX_BYTES = 5_900_000
_MAX_POINTS, _MIN_POINTS = 2000, 24
"""Points per line; fewer where the page would grow beyond its size."""
_ROW_HEIGHT = 250
_STAR = ' <span aria-hidden="true">★</span><span class="hidden-text"> (best)</span>'


@dataclass(frozen=True)
class Cell:
    """One cell of a table: what is shown, and what it is sorted by."""

    text: str
    value: float | str | None
    is_best: bool = False


@dataclass
class Section:
    """A heading with charts under it; ``before`` is HTML that stands above the charts.

    The charts of a section without a heading stand in one row, and are of one height.
    """

    heading: str
    charts: Iterable[Chart] = ()
    before: str = ""


class PageCharts:
    """Collects the charts of a page under their identities."""

    def __init__(self) -> None:
        self._charts: list[tuple[Chart, int]] = []

    def add(self, charts: Iterable[Chart], level: int, num_steps: int, *, is_row: bool) -> str:
        """The frames of these charts, in one row or in as many as they need."""
        frames = ""
        for chart in charts:
            if any(trace["x"] for trace in chart.traces):
                shown = replace(chart, height=_ROW_HEIGHT, is_wide=False) if is_row else chart
                self._charts.append((shown, num_steps))
                frames += _figure_html(shown, f"chart-{len(self._charts)}", level)
        return f'<div class="charts{" row" * is_row}">{frames}</div>' if frames else ""

    def data(self, max_bytes: int) -> str:
        """Everything that the page's script reads, as JSON that can stand in the page."""
        max_points = _MAX_POINTS
        while True:
            charts = [chart.data(max_points, num_steps) for chart, num_steps in self._charts]
            data = _embedded(json.dumps(charts, separators=(",", ":"), allow_nan=False))
            if len(data) < max_bytes or max_points <= _MIN_POINTS:
                return data
            max_points //= 2


def build_page(out: str | Path, *, title: str, footer: str, body: Callable[[PageCharts], str]) -> Path:
    """Write a self-contained page and return its path; an older one is replaced only when it is complete.

    Args:
        out: the file.
        title: what the browser shows.
        footer: the last line.
        body: makes the page's HTML and adds its charts.

    Raises:
        HdetError: plotly, which draws the charts, is not installed.
    """
    charts, files = PageCharts(), resources.files("hdet.lab.page")
    css, script, template = (
        files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js", "template.html")
    )
    parts = {"title": text(title), "footer": text(footer), "css": css, "script": script}
    parts |= {"plotly": _plotly_script(), "body": body(charts)}
    size = sum(len(part.encode("utf-8", "replace")) for part in parts.values())
    page = Template(template).substitute(parts, data=charts.data(_MAX_BYTES - size))
    return _write(Path(out), page.encode("utf-8", "replace"))  # names may hold what has no encoding


def text(value: object) -> str:
    """Any text, safe between tags and in attributes."""
    return html.escape(str(value), quote=True)


def _embedded(data: str) -> str:
    r"""JSON that can stand inside a script element: nothing in it can end the element.

    >>> print(_embedded('"</script>"'))
    "\u003c/script\u003e"
    """
    return data.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"})


def body_html(title: str, introduction: str, main: str) -> str:
    """A page's header and main part; the latter two are HTML."""
    header = f"<header><h1>{text(title)}</h1>{introduction}</header>"
    return f'{header}<main id="content" tabindex="-1">{main}</main>'


def sections_html(sections: Iterable[Section], charts: PageCharts, level: int, num_steps: int = 0) -> str:
    """The sections that have something to show; an axis of steps reaches over so many, or over its data."""
    found = ""
    for section in sections:
        name = text(section.heading)
        heading = f'<h{level} class="part">{name}</h{level}>' if name else ""
        frames = charts.add(section.charts, level + bool(name), num_steps, is_row=not name)
        if section.before or frames:
            found += heading + section.before + frames
    return found


def sentence_html(sentence: str, kind: str) -> str:
    """A paragraph of this class."""
    return f'<p class="{kind}">{_unbroken(sentence)}</p>' if sentence else ""


def _unbroken(sentence: str) -> str:
    """Text in which a number does not break at its sign."""
    return re.sub(r"\d[\d.]*e-\d+", r"<span>\g<0></span>", text(sentence))


def introduction_html(headline: str, sentence: str, tiles: Iterable[Tile], notes: Sequence[str]) -> str:
    """What stands above the charts: two sentences, tiles, and a warning about what cannot be read.

    The first tile is the one that matters most.
    """
    said = sentence_html(headline, "headline") + sentence_html(sentence, "sentence")
    shown = "".join(
        f'<div class="tile"><dt>{text(label)}</dt><dd>{_unbroken(value)}<small>{_unbroken(hint)}</small>'
        "</dd></div>"
        for label, value, hint in tiles
    )
    said += f'<dl class="tiles">{shown}</dl>' if shown else ""
    if notes:
        items = "".join(f"<li>{text(note)}</li>" for note in notes)
        said += '<div class="notes" role="note"><strong>Not everything could be read.</strong>'
        said += f"<ul>{items}</ul></div>"
    return said


def _figure_html(chart: Chart, identity: str, level: int) -> str:
    """The frame of a chart; the page's script draws into it."""
    label = text(f"Chart: {chart.title}. {chart.caption} The numbers are in the table below.")
    return (
        f'<figure class="{"wide" * chart.is_wide}" aria-labelledby="{identity}-title">'
        f'<div class="head"><h{level} class="title" id="{identity}-title">{text(chart.title)}</h{level}>'
        '<div class="tools"></div></div>'
        f'<div class="plot" id="{identity}" role="group" style="min-height:{chart.height}px" '
        f'aria-label="{label}"></div>'
        f"<figcaption>{text(chart.caption)}</figcaption>"
        '<details class="numbers"><summary>Numbers</summary></details></figure>'
    )


def results_html(head: Sequence[str], rows: Sequence[Sequence[Cell]], *, label: str) -> str:
    """A table of results; its heads are buttons that sort it."""
    has_text = [any(isinstance(row[i].value, str) for row in rows) for i in range(len(head))]
    classes = ["" if is_text else "number" for is_text in has_text]
    heads = "".join(
        f'<th scope="col" class="{kind}"><button type="button">{text(name)}</button></th>'
        for name, kind in zip(head, classes, strict=True)
    )
    lines = ""
    for first, *rest in rows:
        lines += f'<tr><th scope="row" data-value="{text(first.value)}">{text(first.text)}</th>'
        for cell, kind in zip(rest, classes[1:], strict=True):
            kind += " best" * cell.is_best
            value = "" if cell.value is None else text(cell.value)
            lines += f'<td class="{kind}" data-value="{value}">{text(cell.text)}{_STAR * cell.is_best}</td>'
        lines += "</tr>"
    return (
        f'<div class="scroll results" tabindex="0" role="region" aria-label="{text(label)}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def settings_html(tables: Mapping[str, Mapping[str, Any]], level: int) -> str:
    """Settings, result and environment as tables, by their titles; empty ones are left out."""
    sections = ""
    for title, entries in tables.items():
        shown = {str(key).replace("_", " "): _plain(value) for key, value in entries.items()}
        rows = (f'<tr><th scope="row">{text(k)}</th><td>{text(v)}</td></tr>' for k, v in shown.items())
        heading = f'<h{level} class="title">{title}</h{level}>'
        sections += f"<section>{heading}<table>{''.join(rows)}</table></section>" if shown else ""
    return f'<div class="settings">{sections}</div>' if sections else ""


def _plain(value: Any) -> str:
    """A setting as one would read it: a line for each entry, and numbers without their noise.

    >>> print(_plain({"a": [0.1 + 0.2, True], "b": None}))
    a: 0.3, yes
    b: none
    """
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_plain(entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "none"
    words = {"None": "none", "": "none", "True": "yes", "False": "no"}
    return figure(value, 6) if isinstance(value, float) else words.get(str(value), str(value))


@functools.cache
def _plotly_script() -> str:
    """Plotly, as text that can stand inside a script element."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise HdetError(f"a report needs plotly to draw its charts: {install_command('cli')}") from error
    return get_plotlyjs().replace("</script", "<\\/script")


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(content)
    return path

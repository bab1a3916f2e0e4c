"""A page as one file: text and charts in, HTML that asks for nothing else out.

Every text that comes from a run is escaped here.
"""

from __future__ import annotations

import functools
import html
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from hdet.errors import HdetError, install_command
from hdet.lab.page.chart import Chart, Pool, embed
from hdet.lab.page.sentences import Tile, figure

_MAX_BYTES = 5_900_000
_MAX_POINTS, _MIN_POINTS = 2000, 24
"""Points per line; fewer where the page would grow beyond its size."""
_MAX_TEXT = 4000
_ROW_HEIGHT = 270
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

    def __init__(self, max_points: int) -> None:
        self.max_points = max_points
        self._pool = Pool()
        self._charts: dict[str, object] = {}

    def add(self, charts: Iterable[Chart], level: int, num_steps: int, *, is_row: bool) -> str:
        """The frames of these charts, in one row or in as many as they need."""
        frames = ""
        for chart in charts:
            shown = replace(chart, height=_ROW_HEIGHT, is_wide=False) if is_row else chart
            identity = f"chart-{len(self._charts) + 1}"
            self._charts[identity] = self._pool.add(shown, num_steps)
            frames += _figure_html(shown, identity, level)
        return f'<div class="charts{" row" * is_row}">{frames}</div>' if frames else ""

    def data(self) -> str:
        """Everything that the page's script reads, as JSON that can stand in the page."""
        charts = json.dumps(self._charts, separators=(",", ":"), allow_nan=False)
        return embed(f'{{"pool":[{",".join(self._pool.texts)}],"charts":{charts}}}')


def build_page(
    out: str | Path, *, title: str, footer: str, body: Callable[[PageCharts], str], refresh_seconds: float = 0
) -> Path:
    """Write a self-contained page and return its path; an older one is replaced only when it is complete.

    Args:
        out: the file.
        title: what the browser shows.
        footer: the last line.
        body: makes the page's HTML and adds its charts. It is called again, with fewer points per line, while
            the page is too large.
        refresh_seconds: how often the page loads itself again; 0 for a page that does not change any more.

    Raises:
        HdetError: plotly, which draws the charts, is not installed.
    """
    files = resources.files("hdet.lab.page")
    css, script, template = (
        files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js", "template.html")
    )
    live = f' data-refresh="{refresh_seconds:g}" data-written="{time.time():.0f}"' if refresh_seconds else ""
    parts = {"title": text(title), "footer": text(footer), "css": css, "script": script, "live": live}
    parts["plotly"] = _plotly_script()
    room = _MAX_BYTES - sum(len(part.encode("utf-8", "replace")) for part in parts.values())
    max_points = _MAX_POINTS
    while True:
        charts = PageCharts(max_points)
        content = body(charts)
        data = charts.data()
        excess = (len(data) + len(content.encode("utf-8", "replace"))) / room
        if excess < 1 or max_points == _MIN_POINTS:
            break
        max_points = max(_MIN_POINTS, int(max_points * min(0.5, 0.6 / excess)))
    page = Template(template).substitute(parts, body=content, data=data)
    return _write(Path(out), page.encode("utf-8", "replace"))  # names may hold what has no encoding


def text(value: object) -> str:
    """Any text, safe between tags and in attributes."""
    return html.escape(str(value), quote=True)


def body_html(title: str, introduction: str, main: str) -> str:
    """A page's header and main part; the latter two are HTML."""
    header = f"<header><h1>{text(title)}</h1>{introduction}</header>"
    return f'{header}<main id="content" tabindex="-1">{main}</main>'


def sections_html(sections: Iterable[Section], charts: PageCharts, level: int, num_steps: int = 0) -> str:
    """The sections that have something to show; an axis of steps reaches over so many, or over its data."""
    found = []
    for section in sections:
        name = text(section.heading)
        heading = f'<h{level} class="part">{name}</h{level}>' if name else ""
        frames = charts.add(section.charts, level + bool(name), num_steps, is_row=not name)
        if section.before or frames:
            found.append(f"{heading}{section.before}{frames}")
    return "".join(found)


def sentence_html(sentence: str, kind: str) -> str:
    """A paragraph of this class."""
    return f'<p class="{kind.strip()}">{_unbroken(sentence)}</p>' if sentence else ""


def _unbroken(sentence: str) -> str:
    """Text in which a number does not break at its sign."""
    return re.sub(r"\d[\d.]*e-\d+", r"<span>\g<0></span>", text(sentence))


def introduction_html(
    headline: str, sentence: str, tiles: Iterable[Tile], notes: Sequence[str], size: str = ""
) -> str:
    """What stands above the charts: two sentences, key figures, and a warning about what cannot be read.

    The first key figure is the one that matters most. ``size`` is a further class of the sentences.
    """
    said = sentence_html(headline, f"headline {size}") + sentence_html(sentence, f"sentence {size}")
    figures = [
        f"<dt>{text(label)}</dt><dd>{text(value)}<small>{_unbroken(hint) or '&nbsp;'}</small></dd>"
        for label, value, hint in tiles
    ]
    if figures:
        items = '</div><div class="tile">'.join(figures)
        said += f'<dl class="tiles" style="--columns:{len(figures)}"><div class="tile">{items}</div></dl>'
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
    numeric = [all(not isinstance(row[i].value, str) for row in rows) for i in range(len(head))]
    heads = "".join(
        f'<th scope="col" class="{"number" * is_number}"><button type="button">{text(name)}</button></th>'
        for name, is_number in zip(head, numeric, strict=True)
    )
    lines = []
    for first, *rest in rows:
        cells = [f'<th scope="row" data-value="{text(first.value)}">{text(first.text)}</th>']
        for cell, is_number in zip(rest, numeric[1:], strict=True):
            classes = " ".join(["number"] * is_number + ["best"] * cell.is_best)
            value = "" if cell.value is None else cell.value
            shown = text(cell.text) + _STAR * cell.is_best
            cells.append(f'<td class="{classes}" data-value="{text(value)}">{shown}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll results" tabindex="0" role="region" aria-label="{text(label)}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def settings_html(tables: Mapping[str, Mapping[str, Any]], level: int) -> str:
    """Settings, result and environment as tables, by their titles; empty ones are left out."""
    sections = []
    for title, entries in tables.items():
        shown = {str(key).replace("_", " "): _plain(value)[:_MAX_TEXT] for key, value in entries.items()}
        rows = "".join(
            f'<tr><th scope="row">{text(key)}</th><td>{text(value)}</td></tr>' for key, value in shown.items()
        )
        heading = f'<h{level} class="title">{title}</h{level}>'
        sections.append(f"<section>{heading}<table>{rows}</table></section>" if rows else "")
    return f'<div class="settings">{"".join(sections)}</div>' if any(sections) else ""


def _plain(value: Any) -> str:
    """A setting as one would read it: a line for each entry, and numbers without their noise.

    >>> print(_plain({"a": [0.1 + 0.2, True], "b": None}))
    a: 0.3, yes
    b: none
    """
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_plain(entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return figure(value, 6)
    return "none" if value is None or value == "" else str(value)


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
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path

"""A page as one file: text and charts in, HTML that asks for nothing else out."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from string import Template

from hdet.errors import HdetError, install_command
from hdet.lab.page.chart import Chart, Pool, embed
from hdet.lab.page.pieces import figure_html, text

_MAX_BYTES = 5_900_000
_MAX_POINTS, _MIN_POINTS = 2000, 24
"""Points per line; fewer where the page would grow beyond its size."""


class Pieces:
    """Collects the charts of a page under their identities."""

    def __init__(self, max_points: int) -> None:
        self.max_points = max_points
        self._pool = Pool()
        self._charts: dict[str, object] = {}

    def add(self, charts: Iterable[Chart], level: int, *, is_row: bool = False) -> str:
        """The frames of these charts, in one row or in as many as they need.

        A half that is alone in its row takes all of it.
        """
        listed = list(charts)
        if not listed:
            return ""
        if is_row:
            frames = "".join(self._add(chart, level, is_wide=False) for chart in listed)
            return f'<div class="charts row" style="--columns:{len(listed)}">{frames}</div>'
        frames, is_second = [], False
        for chart, following in zip_longest(listed, listed[1:]):
            is_alone = not is_second and (following is None or following.is_wide)
            is_wide = chart.is_wide or is_alone
            is_second = not is_wide and not is_second
            frames.append(self._add(chart, level, is_wide=is_wide))
        return f'<div class="charts">{"".join(frames)}</div>'

    def _add(self, chart: Chart, level: int, *, is_wide: bool) -> str:
        identity = f"chart-{len(self._charts) + 1}"
        self._charts[identity] = self._pool.add(chart)
        return figure_html(chart, identity, level=level, is_wide=is_wide)

    def data(self) -> str:
        """What the page's script reads, as JSON that can stand in the page."""
        charts = json.dumps(self._charts, separators=(",", ":"), allow_nan=False)
        return embed(f'{{"pool":[{",".join(self._pool.texts)}],"charts":{charts}}}')


@dataclass
class Section:
    """A heading with charts under it; ``before`` is HTML that stands above the charts.

    The charts of a section without a heading stand in one row.
    """

    heading: str
    charts: Iterable[Chart] = ()
    before: str = ""


def sections_html(sections: Iterable[Section], pieces: Pieces, level: int) -> str:
    """The sections that have something to show."""
    found = []
    for section in sections:
        charts = pieces.add(section.charts, level + bool(section.heading), is_row=not section.heading)
        if section.before or charts:
            heading = f'<h{level} class="part">{text(section.heading)}</h{level}>' if section.heading else ""
            found.append(f"{heading}{section.before}{charts}")
    return "".join(found)


def body_html(title: str, introduction: str, main: str) -> str:
    """A page's header and main part; the latter two are HTML."""
    header = f"<header><h1>{text(title)}</h1>{introduction}</header>"
    return f'{header}<main id="content" tabindex="-1">{main}</main>'


def build_page(
    out: str | Path, *, title: str, footer: str, body: Callable[[Pieces], str], refresh_seconds: float = 0
) -> Path:
    """Write a self-contained page and return its path; an older one is replaced only when it is complete.

    Args:
        out: the file.
        title: what the browser shows.
        footer: the last line.
        body: makes the page's HTML and adds its charts to the pieces. It is called again, with fewer points
            per line, while the page is too large.
        refresh_seconds: how often the page loads itself again; 0 for a page that does not change any more.

    Raises:
        HdetError: plotly, which draws the charts, is not installed.
    """
    files = resources.files("hdet.lab.page")
    parts = {
        "title": text(title),
        "css": files.joinpath("page.css").read_text(encoding="utf-8"),
        "script": files.joinpath("page.js").read_text(encoding="utf-8"),
        "plotly": _plotly_script(),
        "footer": text(footer),
        "live": f' data-refresh="{refresh_seconds:g}" data-written="{time.time():.0f}"'
        * (refresh_seconds > 0),
    }
    template = Template(files.joinpath("template.html").read_text(encoding="utf-8"))
    room = _MAX_BYTES - sum(len(part.encode("utf-8", "replace")) for part in parts.values())
    max_points = _MAX_POINTS
    while True:
        pieces = Pieces(max_points)
        content = body(pieces)
        data = pieces.data()
        excess = (len(data) + len(content.encode("utf-8", "replace"))) / room
        if excess < 1 or max_points == _MIN_POINTS:
            break
        max_points = max(_MIN_POINTS, int(max_points * min(0.5, 0.6 / excess)))
    page = template.substitute(parts, body=content, data=data)
    return _write(Path(out), page.encode("utf-8", "replace"))  # names may hold what has no encoding


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

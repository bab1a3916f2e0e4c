"""Assemble the page: header, sections of charts, settings; one file that asks for nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from string import Template

from hdet.errors import HdetError
from hdet.report.chart import Chart, Pool, embed
from hdet.report.compare import comparison_charts, comparison_table
from hdet.report.finders import finder_charts
from hdet.report.pieces import figure_html, notes_html, results_html, settings_html, text, tiles_html
from hdet.report.runs import Run
from hdet.report.steering import controller_charts, hyperparameter_charts
from hdet.report.training import health_charts, training_charts
from hdet.report.words import comparison_sentence, count, excluded_events, figure, sentence

__all__ = ["build_report"]

_MAX_BYTES = 5_900_000
_MAX_POINTS, _MIN_POINTS = 2000, 24
"""Points per line; fewer where the page would grow beyond its size."""


def build_report(runs: Sequence[Run], out: str | Path) -> Path:
    """Write one self-contained page about one or several runs, and return its path.

    The page replaces an older one only when it is complete.

    Raises:
        ValueError: there is no run.
        HdetError: plotly, which draws the charts, is not installed.
    """
    if not runs:
        raise ValueError("runs must hold at least one run, got none")
    files = resources.files("hdet.report")
    plotly = _plotly_script()
    parts = {
        "title": text(runs[0].name if len(runs) == 1 else f"{len(runs)} runs") + " - hdet report",
        "css": files.joinpath("page.css").read_text(encoding="utf-8"),
        "script": files.joinpath("page.js").read_text(encoding="utf-8"),
        "plotly": plotly.replace("</script", "<\\/script"),
        "footer": _footer(runs),
    }
    template = Template(files.joinpath("template.html").read_text(encoding="utf-8"))
    room = _MAX_BYTES - sum(len(part.encode("utf-8", "replace")) for part in parts.values())
    max_points = _MAX_POINTS
    while True:
        pieces = _Pieces(max_points)
        body = _one_run(runs[0], pieces) if len(runs) == 1 else _several_runs(runs, pieces)
        data = pieces.data()
        excess = (len(data) + len(body.encode("utf-8", "replace"))) / room
        if excess < 1 or max_points == _MIN_POINTS:
            break
        max_points = max(_MIN_POINTS, int(max_points * min(0.5, 0.6 / excess)))
    page = template.substitute(parts, body=body, data=data)
    return _write(Path(out), page.encode("utf-8", "replace"))  # names may hold what has no encoding


class _Pieces:
    """Collects the charts of a page under their identities."""

    def __init__(self, max_points: int) -> None:
        self.max_points = max_points
        self._pool = Pool()
        self._charts: dict[str, object] = {}

    def add(self, charts: Iterable[Chart], level: int) -> str:
        """The frames of these charts, in rows; a half alone in its row takes it all."""
        listed = list(charts)
        frames, is_second = [], False
        for chart, following in zip_longest(listed, listed[1:]):
            is_alone = not is_second and (following is None or following.is_wide)
            is_wide = chart.is_wide or is_alone
            is_second = not is_wide and not is_second
            identity = f"chart-{len(self._charts) + 1}"
            self._charts[identity] = self._pool.add(chart)
            frames.append(figure_html(chart, identity, level=level, is_wide=is_wide))
        return "".join(frames)

    def data(self) -> str:
        """What the page's script reads, as JSON that can stand in the page."""
        charts = json.dumps(self._charts, separators=(",", ":"), allow_nan=False)
        return embed(f'{{"pool":[{",".join(self._pool.texts)}],"charts":{charts}}}')


@dataclass
class _Part:
    heading: str
    charts: Iterable[Chart]
    after: str = ""


def _one_run(run: Run, pieces: _Pieces) -> str:
    header = f"<header><h1>{text(run.name)}</h1>{_introduction(run)}</header>"
    return f'{header}<main id="content" tabindex="-1">{_parts_of(run, pieces, level=2)}</main>'


def _several_runs(runs: Sequence[Run], pieces: _Pieces) -> str:
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    header = (
        f"<header><h1>{count(len(runs), 'run')}</h1>"
        f'<p class="sentence">{text(comparison_sentence(runs))}</p>{notes_html(notes)}</header>'
    )
    charts = pieces.add(comparison_charts(runs, pieces.max_points), level=3)
    comparison = (
        f'<h2 class="part">Comparison</h2>{results_html(*comparison_table(runs))}'
        f'<div class="charts">{charts}</div><h2 class="part">Every run</h2>'
    )
    sections = []
    for run in runs:
        loss = (
            f"held-out loss {figure(run.final_loss, 4)}" if run.final_loss is not None else "no held-out loss"
        )
        sections.append(
            f'<details class="run"><summary><h2>{text(run.name)}</h2>'
            f"<span>{text(loss)}, {text(run.status)}</span></summary>"
            f"{_introduction(run, is_small=True)}{_parts_of(run, pieces, level=3)}</details>"
        )
    return f'{header}<main id="content" tabindex="-1">{comparison}{"".join(sections)}</main>'


def _introduction(run: Run, *, is_small: bool = False) -> str:
    size = " small" if is_small else ""
    return f'<p class="sentence{size}">{text(sentence(run))}</p>{tiles_html(run)}{notes_html(run.notes)}'


def _parts_of(run: Run, pieces: _Pieces, level: int) -> str:
    points = pieces.max_points
    nobody = run.records and not excluded_events(run)
    parts = [
        _Part("Training", training_charts(run, points)),
        _Part("Finding the learning rate", finder_charts(run, points)),
        _Part("Hyperparameters", hyperparameter_charts(run, points)),
        _Part("Replicas and controller", controller_charts(run, points)),
        _Part(
            "Cost and health",
            health_charts(run, points),
            '<p class="fact">No replica was left out.</p>' if nobody else "",
        ),
    ]
    found = []
    for part in parts:
        inside = pieces.add(part.charts, level + 1) + part.after
        if inside:
            found.append(
                f'<h{level} class="part">{part.heading}</h{level}><div class="charts">{inside}</div>'
            )
    settings = settings_html(run, level + 1)
    if settings:
        found.append(f'<h{level} class="part">Settings and environment</h{level}>{settings}')
    return "".join(found)


def _footer(runs: Sequence[Run]) -> str:
    version = next(
        (run.environment["hdet"] for run in runs if isinstance(run.environment.get("hdet"), str)), ""
    )
    return f"Written by hdet {text(version)}. The page is one file and loads nothing from elsewhere."


def _plotly_script() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise HdetError("a report needs plotly to draw its charts: pip install 'hdet[cli]'") from error
    return get_plotlyjs()


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path

"""The report of one or several runs: built once, or again and again while a run trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import hdet
from hdet.checks import require_number
from hdet.lab.page import html_page, run_comparison, sentences
from hdet.lab.page.html_page import PageCharts, Section
from hdet.lab.page.loss_charts import loss_charts, metric_charts, search_charts
from hdet.lab.page.read_runs import Run, read_run
from hdet.lab.page.replica_charts import controller_charts, health_charts, said_charts, said_over_run_charts
from hdet.lab.page.value_charts import rate_charts, value_charts
from hdet.lab.page.what_held_out_data_said import what_held_out_data_said
from hdet.trackers import Tracker

_LARGEST_SHARE = 0.05
"""Of the time that may be spent on pages."""
_SECTIONS = {
    "What the replicas said, by value": said_charts,
    "Hyperparameters": value_charts,
    "Controller": controller_charts,
    "Metrics": metric_charts,
    "Cost and health": health_charts,
}


def build_report(runs: Sequence[Run], out: str | Path, *, refresh_seconds: float = 0) -> Path:
    """Write one self-contained page about one or several runs, and return its path.

    The page replaces an older one only when it is complete.

    Args:
        runs: what :func:`read_run` has read.
        out: the file.
        refresh_seconds: how often an open page loads itself again, for a run that still trains; 0 for never.

    Raises:
        ValueError: there is no run.
        HdetError: plotly, which draws the charts, is not installed.
    """
    if not runs:
        raise ValueError("runs must hold at least one run, got none")
    return html_page.build_page(
        out,
        title=(runs[0].name if len(runs) == 1 else f"{len(runs)} runs") + " - hdet report",
        footer=f"Written by hdet {hdet.__version__}. The page is one file and loads nothing from elsewhere.",
        body=lambda charts: _one_run(runs[0], charts) if len(runs) == 1 else _several_runs(runs, charts),
        refresh_seconds=refresh_seconds,
    )


def _several_runs(runs: Sequence[Run], charts: PageCharts) -> str:
    words = run_comparison.comparison_headline(runs), run_comparison.comparison_sentence(runs)
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    points = charts.max_points
    head, rows, shared = run_comparison.comparison_table(runs)
    said = ", ".join(f"{name} {value}" for name, value in shared.items())
    table = html_page.results_html(head, rows, label="Results of all runs")
    table += html_page.sentence_html(f"In all runs: {said}." if said else "", "common")
    sections = [
        Section("", run_comparison.comparison_charts(runs, points)),
        Section("Results", run_comparison.comparison_metric_charts(runs, points), before=table),
    ]
    num_steps = max(run.num_planned_steps for run in runs)
    main = html_page.sections_html(sections, charts, 2, num_steps) + '<h2 class="part">Every run</h2>'
    for run in runs:
        loss = run.final_loss
        said = "no held-out loss" if loss is None else f"held-out loss {sentences.figure(loss, 4)}"
        name, said = html_page.text(run.name), html_page.text(f"{said}, {run.status}")
        main += f'<details class="run"><summary><h2>{name}</h2><span>{said}</span></summary>'
        main += f"{_introduction_of(run, 'small')}{_parts_of(run, charts, level=3)}</details>"
    introduction = html_page.introduction_html(*words, [], notes)
    return html_page.body_html(sentences.count(len(runs), "run"), introduction, main)


def _one_run(run: Run, charts: PageCharts) -> str:
    return html_page.body_html(run.name, _introduction_of(run), _parts_of(run, charts, level=2))


def _introduction_of(run: Run, size: str = "") -> str:
    said = sentences.headline(run), sentences.sentence(run), sentences.run_tiles(run)
    return html_page.introduction_html(*said, run.notes, size)


def _parts_of(run: Run, charts: PageCharts, level: int) -> str:
    points = charts.max_points
    first = [*search_charts(run), *rate_charts(run, points)]
    first += [*said_over_run_charts(run, points), *loss_charts(run, points)]
    looks = what_held_out_data_said(run.records)
    starts = {one.name: one.first for one in looks if one.name in run.config}
    settings = {name: value for name, value in (run.config | starts).items() if name != "explore" or value}
    found = {f"found_{one.name}": one.last for one in looks}
    tables = {"Settings": settings, "Result": run.result | found, "Environment": run.environment}
    sections = [
        Section("", first),
        *(Section(heading, charts_of(run, points)) for heading, charts_of in _SECTIONS.items()),
        Section("Settings and environment", before=html_page.settings_html(tables, level + 1)),
    ]
    return html_page.sections_html(sections, charts, level, run.num_planned_steps)


class LivePage(Tracker):
    """A sink that writes the page of a run again while the run trains.

    Open the page in a browser. It loads itself again until the run has ended, and needs no server. It reads
    what other sinks have written into the folder, so give it after them::

        records = hdet.Tee(hdet.Records("runs/mine/records.jsonl"), LivePage("runs/mine"))

    Pages are written at syncs and evaluations, not more often than ``every_seconds``, and take at most a
    twentieth of the time. Call ``close()`` at the end. A page that cannot be written gives one warning, and
    the training goes on.

    Args:
        folder: of the run.
        out: the page; ``report.html`` in the folder if None.
        every_seconds: the least time between two pages.
    """

    def __init__(
        self, folder: str | Path, out: str | Path | None = None, *, every_seconds: float = 5.0
    ) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.out = self.folder / "report.html" if out is None else Path(out)
        self.every_seconds = require_number("every_seconds", every_seconds, above=0)
        self._due = 0.0

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the page if it is time; see :class:`hdet.trackers.Tracker`."""
        start = time.monotonic()
        if start < self._due:
            return
        _write([self.folder], self.out, self.every_seconds)
        end = time.monotonic()
        self._due = end + max(self.every_seconds, (end - start) / _LARGEST_SHARE)

    def finish(self) -> None:
        """Write the page for the last time."""
        if self.folder.is_dir():
            _write([self.folder], self.out, 0)


def follow(
    folders: Sequence[Path],
    out: Path,
    *,
    every_seconds: float = 5.0,
    on_written: Callable[[Path], None] = lambda _: None,
) -> list[Run]:
    """Write the page again whenever the files of the runs change, until all runs have ended.

    Ctrl-C ends it too: the page is then written for the last time.

    Args:
        folders: of the runs.
        out: the page.
        every_seconds: the least time between two pages.
        on_written: called with the page once it is there.
    """
    runs = _write(folders, out, every_seconds)
    on_written(out)
    try:
        while not _are_over(runs):
            before = _changed(folders)
            while _changed(folders) == before:
                time.sleep(min(1.0, every_seconds))
            runs = _write(folders, out, every_seconds)
            time.sleep(every_seconds)
    except KeyboardInterrupt:
        runs = _write(folders, out, 0)
    return runs


def _write(folders: Sequence[Path], out: Path, refresh_seconds: float) -> list[Run]:
    runs = [read_run(folder) for folder in folders]
    build_report(runs, out, refresh_seconds=0 if _are_over(runs) else refresh_seconds)
    return runs


def _are_over(runs: Sequence[Run]) -> bool:
    return all(run.status not in ("unfinished", "recorded") for run in runs)


def _changed(folders: Sequence[Path]) -> list[int]:
    """When the files of the runs were written last."""
    files = [file for folder in folders for file in sorted(folder.glob("*.json*"))]
    return [file.stat().st_mtime_ns for file in files]

"""The page of a run while it trains: written again now and then, and loaded again by an open browser."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hdet.checks import require_number
from hdet.lab.page.page import build_report
from hdet.lab.page.runs import Run, read_run
from hdet.trackers.base import Tracker

_LARGEST_SHARE = 0.05
"""Of the time that may be spent on pages."""


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
        """Write the page if it is time; see :class:`hdet.trackers.base.Tracker`."""
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

"""``hdet report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hdet.errors import HdetError
from hdet.lab.cli.options import Json, Live, Quiet
from hdet.lab.cli.output import Screen, usage_errors


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or of a sweep. Several runs are compared.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page (default: report.html in the folder, comparison.html for several)."),
    ] = None,
    live: Live = False,
    is_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Build the page of a run again, or a page that compares several.

    With --live the page is written whenever the files change, until the runs have ended. Ctrl-C ends it too.
    """
    from hdet.lab.page import build_report, follow, read_run, runs_within

    screen = Screen(is_json=is_json, is_quiet=quiet)
    with usage_errors():
        place = folders[0] if len(folders) == 1 else Path()
        folders = [run for folder in folders for run in runs_within(folder)]
        page = out or place / ("report.html" if folders == [place] else "comparison.html")
        if live:
            runs = follow(folders, page, on_written=lambda path: screen.say(f"watch: {path}"))
        else:
            runs = [read_run(folder) for folder in folders]
            build_report(runs, page)
    for run in runs:
        for note in run.notes:
            screen.say(f"note: {run.name}: {note}")
    screen.say(f"report: {page}")
    screen.give({"report": str(page), "notes": {run.name: run.notes for run in runs}})


def write_report(folders: list[Path], out: Path, screen: Screen) -> Path | None:
    """The page at the end of a run; a run is not lost because its page cannot be drawn."""
    try:
        from hdet.lab.page import build_report, read_run

        return build_report([read_run(folder) for folder in folders], out)
    except (HdetError, OSError, ValueError) as error:
        screen.say(f"no report: {error}")
        return None

"""``python -m research claims``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hdet.errors import HdetError
from hdet.lab.cli.options import Jobs, Json, Quiet, Seeds
from hdet.lab.cli.screen import Exit, Screen, usage_errors
from hdet.lab.pool import stop_on_signal

if TYPE_CHECKING:
    from research.claims import Claims

__all__ = ["claims"]


def claims(
    folder: Annotated[Path | None, typer.Argument(help="With --table: the folder of earlier runs.")] = None,
    study: Annotated[
        list[str] | None,
        typer.Option(help="exploration, robustness, prior or mechanism; repeatable (default: all)."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of every run.")] = 500,
    seeds: Seeds = 3,
    replicas: Annotated[int, typer.Option(help="Number of replicas, N.")] = 8,
    jobs: Jobs = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs (default: runs/claims).")] = None,
    is_table: Annotated[
        bool, typer.Option("--table", help="Build table and figure of the folder again, without running.")
    ] = False,
    is_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Judge the paper's claims beyond its Table 1, on charlm.

    exploration: can dropout, weight decay, attention temperature and label smoothing be explored like the LR?
    robustness: do spread, T and temperature matter? prior: does a start for each parameter group help that
    earlier runs give? mechanism: what can the signal of a round see? Runs that are in the folder are not
    repeated.
    """
    from research.claims import STUDIES, read_claims, run_claims, table

    screen = Screen(is_json=is_json, is_quiet=quiet)
    with usage_errors():
        if is_table:
            if folder is None:
                raise ValueError("--table must be followed by a folder: claims --table FOLDER")
            path, found = out or folder, read_claims(folder)
        elif folder is not None:
            raise ValueError(
                f"a folder goes with --table, got {str(folder)!r} without: for a new one give --out"
            )
        else:
            path = out or Path("runs") / "claims"
            with (
                stop_on_signal() as should_stop,
                screen.progress(1000, "claims (‰)", shows_loss=False) as bar,
            ):
                found = run_claims(
                    studies=study or list(STUDIES),
                    seeds=seeds,
                    steps=steps,
                    replicas=replicas,
                    folder=path,
                    num_jobs=jobs,
                    on_done=lambda done, total: bar.update(1000 * done // total),
                    should_stop=should_stop,
                )
        text = table(found)
        figure = _write(path, found, text, screen)
    screen.say(text)
    if figure is not None:
        screen.say(f"figure: {figure}")
    screen.give(
        {
            "records": found.records,
            "is_complete": found.is_complete,
            "figure": None if figure is None else str(figure),
            "run_dir": str(path),
        }
    )
    if not found.is_complete:
        screen.say("stopped; the same command goes on")
        raise typer.Exit(Exit.STOPPED)


def _write(path: Path, found: Claims, text: str, screen: Screen) -> Path | None:
    from research.claims.page import write_figure

    path.mkdir(parents=True, exist_ok=True)
    (path / "claims.md").write_text(text, encoding="utf-8")
    try:
        return write_figure(found, path / "mechanism.png")
    except HdetError as error:  # the table does not need it
        screen.say(f"no figure: {error}")
        return None

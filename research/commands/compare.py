"""``python -m research compare``."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hdet.errors import HdetError
from hdet.lab.cli.options import Jobs, Json, Quiet, Seeds, TaskName, TaskOptions
from hdet.lab.cli.screen import Exit, Screen, numbers, usage_errors
from hdet.lab.pool import stop_on_signal

if TYPE_CHECKING:
    from research.compare import Case, Comparison

__all__ = ["compare"]


def compare(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="With --table: folders of earlier comparisons.")
    ] = None,
    task: TaskName = "charlm",
    methods: Annotated[
        str,
        typer.Option(help="Comma-separated (default: most); --methods help says what there is."),
    ] = "",
    starts: Annotated[
        str, typer.Option(help="Starting LRs, comma-separated, as factors on the best of the sweep.")
    ] = "0.1,1,10",
    seeds: Seeds = 3,
    optimizer: Annotated[str, typer.Option(help="adamw, sgd, or both: adamw,sgd.")] = "adamw",
    steps: Annotated[int | None, typer.Option(help="Steps of every run (default: the task's).")] = None,
    replicas: Annotated[int, typer.Option(help="Batches per step, as N replicas would take.")] = 8,
    option: TaskOptions = None,
    jobs: Jobs = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the comparison (default: runs/compare).")
    ] = None,
    is_table: Annotated[
        bool, typer.Option("--table", help="Build the table of the folders again, without running.")
    ] = False,
    is_timed: Annotated[
        bool, typer.Option("--time", help="Measure wall-clock too: one more run of each, in turn with plain.")
    ] = False,
    is_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare hdet with what you could do instead, from starts that are off by known factors.

    A sweep of plain runs finds the best LR; every method then trains with the same steps and batches from
    multiples of it. Runs that are in the folder are not repeated: a comparison that was stopped goes on, and
    one with more methods, starts or seeds is extended.
    """
    from hdet.lab.tasks.task import parse_options
    from research.compare import compare as run_comparison
    from research.compare import read_comparison, table
    from research.peers import DEFAULTS, METHODS

    screen = Screen(is_json=is_json, is_quiet=quiet)
    if methods == "help":
        for method in METHODS.values():
            screen.say(f"{method.name}: {method.description}")
        raise typer.Exit
    with usage_errors():
        if is_table:
            if not folders:
                raise ValueError("--table must be followed by a folder at least: compare --table FOLDER...")
            path = out or (folders[0] if len(folders) == 1 else None)
            comparison = read_comparison(folders)
        elif folders:
            raise ValueError(
                f"folders go with --table, got {str(folders[0])!r} without: for a new one give --out"
            )
        else:
            path = out or Path("runs") / "compare"
            chosen = _names(methods) or list(DEFAULTS)
            bar_total = 1000  # thousandths: the sweep may grow while it runs
            with (
                stop_on_signal() as should_stop,
                screen.progress(bar_total, "compare (‰)", shows_loss=False) as bar,
            ):
                comparison = run_comparison(
                    [(task, parse_options(option or []))],
                    methods=chosen,
                    optimizers=_names(optimizer),
                    starts=numbers("--starts", starts),
                    seeds=seeds,
                    steps=steps,
                    replicas=replicas,
                    folder=path,
                    num_jobs=jobs,
                    is_timed=is_timed,
                    on_done=lambda done, total: bar.update(bar_total * done // total),
                    should_stop=should_stop,
                )
        text = table(comparison)
        page = None if path is None else _write(path, comparison, text, screen)
    screen.say(text)
    if page is not None:
        screen.say(f"report: {page}")
    screen.give(
        {
            "cases": [_plain(_data(case)) for case in comparison.cases],
            "is_complete": comparison.is_complete,
            "run_dir": None if path is None else str(path),
        }
    )
    if not comparison.is_complete:
        screen.say("stopped; the same command goes on")
        raise typer.Exit(Exit.STOPPED)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _write(path: Path, comparison: Comparison, text: str, screen: Screen) -> Path | None:
    from research.compare.page import build_comparison

    path.mkdir(parents=True, exist_ok=True)
    (path / "compare.md").write_text(text, encoding="utf-8")
    try:
        return build_comparison(comparison, path / "compare.html")
    except HdetError as error:  # the table does not need it
        screen.say(f"no report: {error}")
        return None


def _data(case: Case) -> dict[str, Any]:
    data = dataclasses.asdict(case)
    for row, entry in zip(case.rows, data["rows"], strict=True):
        for start, cell in row.cells.items():
            entry["cells"][start] |= {"mean": cell.mean, "deviation": cell.deviation}
    return data


def _plain(value: Any) -> Any:
    """JSON has no infinity, and its keys are text."""
    if isinstance(value, dict):
        return {f"{key:g}" if isinstance(key, float) else key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

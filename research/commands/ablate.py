"""``python -m research ablate``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hdet.errors import HdetError
from hdet.lab.cli.options import Jobs, Json, Quiet, Seeds, TaskName, TaskOptions
from hdet.lab.cli.screen import Exit, Screen, numbers, usage_errors
from hdet.lab.pool import stop_on_signal

if TYPE_CHECKING:
    from research.ablation import Ablation, Case

__all__ = ["ablate"]


def ablate(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="With --table: folders of earlier ablations.")
    ] = None,
    task: TaskName = "feed",
    steps: Annotated[int | None, typer.Option(help="Steps of every run (default: the task's).")] = None,
    seeds: Seeds = 3,
    decisive_seeds: Annotated[
        int, typer.Option(help="Seeds of the rows that a verdict hangs on, if more than --seeds.")
    ] = 0,
    lrs: Annotated[
        str, typer.Option(help="Learning rates of the grid, with commas (default: by rule).")
    ] = "",
    optimizer: Annotated[str, typer.Option(help="adamw or sgd.")] = "adamw",
    replicas: Annotated[int, typer.Option(help="Replicas of HDET, and batches per step of all rows.")] = 8,
    option: TaskOptions = None,
    jobs: Jobs = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the ablation (default: runs/ablate-TASK).")
    ] = None,
    is_table: Annotated[
        bool, typer.Option("--table", help="Build table and figures of the folders again, without running.")
    ] = False,
    is_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Repeat the paper's Table 1 with the rows that it leaves out, and judge its claims.

    Plain runs over a grid say which LR breaks training (High) and which is safe (Low). Every row then trains
    with the same steps and batches. Runs that are in the folder are not repeated: an ablation that was
    stopped goes on, and one with more seeds is extended.
    """
    from hdet.lab.tasks.task import parse_options
    from research.ablation import ablate as run_ablation
    from research.ablation import read_ablation, table

    screen = Screen(is_json=is_json, is_quiet=quiet)
    with usage_errors():
        if is_table:
            if not folders:
                raise ValueError("--table must be followed by a folder at least: ablate --table FOLDER...")
            path = out or (folders[0] if len(folders) == 1 else None)
            ablation = read_ablation(folders)
        elif folders:
            raise ValueError(
                f"folders go with --table, got {str(folders[0])!r} without: for a new one give --out"
            )
        else:
            path = out or Path("runs") / f"ablate-{Path(task.rpartition(':')[2]).stem.lower()}"
            bar_total = 1000  # thousandths: the grid may grow while it runs
            with (
                stop_on_signal() as should_stop,
                screen.progress(bar_total, "ablate (‰)", shows_loss=False) as bar,
            ):
                ablation = run_ablation(
                    task,
                    task_options=parse_options(option or []),
                    optimizer=optimizer,
                    seeds=seeds,
                    decisive_seeds=decisive_seeds,
                    lrs=numbers("--lrs", lrs),
                    steps=steps,
                    replicas=replicas,
                    folder=path,
                    num_jobs=jobs,
                    on_done=lambda done, total: bar.update(bar_total * done // total),
                    should_stop=should_stop,
                )
        text = table(ablation)
        figures = [] if path is None else _write(path, ablation, text, screen)
    screen.say(text)
    for figure in figures:
        screen.say(f"figure: {figure}")
    screen.give(
        {
            "cases": [_data(case) for case in ablation.cases],
            "is_complete": ablation.is_complete,
            "figures": [str(figure) for figure in figures],
            "run_dir": None if path is None else str(path),
        }
    )
    if not ablation.is_complete:
        screen.say("stopped; the same command goes on")
        raise typer.Exit(Exit.STOPPED)


def _write(path: Path, ablation: Ablation, text: str, screen: Screen) -> list[Path]:
    from research.ablation.figures import write_figures

    path.mkdir(parents=True, exist_ok=True)
    (path / "ablation.md").write_text(text, encoding="utf-8")
    try:
        return write_figures(ablation, path)
    except HdetError as error:  # the table does not need them
        screen.say(f"no figures: {error}")
        return []


def _data(case: Case) -> dict[str, Any]:
    from research.ablation import claims

    return {
        **case.facts,
        "seeds": case.seeds,
        "chosen": None if case.chosen is None else dataclasses.asdict(case.chosen),
        "rows": [
            {
                "row": result.row.name,
                "key": result.row.key,
                "lr": result.lr,
                "losses": {seed: run["final_loss"] for seed, run in result.runs.items()},
                "num_crashed": result.num_crashed,
            }
            for result in case.results
        ],
        "claims": [dataclasses.asdict(claim) for claim in claims(case)],
    }

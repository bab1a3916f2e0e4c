"""``python -m research explore``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hdet.lab.cli.options import Jobs, Quiet
from hdet.lab.cli.screen import usage_errors
from research.commands.running import run_and_show
from research.commands.zoo import SPLITS

__all__ = ["explore"]


def explore(
    split: Annotated[str, typer.Option(help="dev, held-out, or all.")] = "all",
    problems: Annotated[str, typer.Option(help="Comma-separated (default: all of the split).")] = "",
    stages: Annotated[
        str,
        typer.Option(
            help="main: against the default and a sweep. starts: further starts and baselines. lr: wrong "
            "learning rates. joint: unknown ones, against a sweep of both."
        ),
    ] = "main,starts,lr,joint",
    seeds: Annotated[int, typer.Option(min=1, max=5, help="Fresh seeds of the comparison.")] = 5,
    jobs: Jobs = 0,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/explore"),
    is_table: Annotated[
        bool, typer.Option("--table", help="Print the tables of what is there, without running.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Judge the weight decay that is found in the run, on problems half of which were held out.

    Every problem is swept first over seven or more fixed weight decays. The best is run again on fresh seeds,
    beside the default and beside runs that explore. Runs that are in the folder are not repeated, so that a
    study that was stopped goes on.
    """
    from hdet.checks import require_choice
    from research.explore.experiment import open_ledger, run_study
    from research.explore.problems import names
    from research.explore.summary import tables

    with usage_errors():
        require_choice("--split", split, tuple(SPLITS))
        wanted = [name for name in problems.split(",") if name]
        for name in wanted:
            require_choice("--problems", name, tuple(names()))
        chosen = [stage for stage in stages.split(",") if stage]
        for stage in chosen:
            require_choice("--stages", stage, ("main", "starts", "lr", "joint"))
        run = partial(
            run_study,
            out,
            split=SPLITS[split],
            problems=wanted,
            num_seeds=seeds,
            stages=chosen,
            num_jobs=jobs,
        )
        run_and_show(
            "explore", None if is_table else run, lambda: tables(open_ledger(out).records), quiet=quiet
        )

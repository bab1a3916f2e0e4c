"""``python -m research recipe``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hdet.lab.cli.options import Jobs, Quiet
from hdet.lab.cli.screen import usage_errors
from research.commands.running import run_and_show
from research.commands.zoo import SPLITS

__all__ = ["recipe"]


def recipe(
    arms: Annotated[
        str,
        typer.Option(help="Comma-separated, such as 'guess,find,everything' (default: the baselines alone)."),
    ] = "",
    split: Annotated[str, typer.Option(help="dev, held-out, or all.")] = "dev",
    problems: Annotated[str, typer.Option(help="Comma-separated (default: all of the split).")] = "",
    seeds: Annotated[int, typer.Option(min=1, max=5, help="Seeds of the arms.")] = 2,
    jobs: Jobs = 1,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/recipe"),
    is_table: Annotated[
        bool, typer.Option("--table", help="Print the tables of what is there, without running.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Judge the whole recipe against a sweep of learning rates and weight decays.

    Every problem is swept first, and the winner is run again on fresh seeds. The arms begin from a tenth, one
    and ten times its learning rate, from 1e-5 and from 1e-1, with the weight decay that people have where
    they did not look. Runs that are in the folder are not repeated, so that a study that was stopped goes on.

    The held-out problems are judged once, when nothing is changed any more: their arms are run with
    --split held-out alone.
    """
    from hdet.checks import require_choice
    from research.recipe.experiment import open_ledger, run_study
    from research.recipe.summary import tables

    with usage_errors():
        require_choice("--split", split, tuple(SPLITS))
        run = partial(
            run_study,
            out,
            split=SPLITS[split],
            problems=[name for name in problems.split(",") if name],
            arms=[arm.strip() for arm in arms.split(",") if arm],
            num_seeds=seeds,
            num_jobs=jobs,
        )
        run_and_show(
            "recipe", None if is_table else run, lambda: tables(open_ledger(out).records), quiet=quiet
        )

"""``python -m research thermostat``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hdet.lab.cli.options import Jobs, Quiet, Seeds
from hdet.lab.cli.screen import usage_errors
from research.commands.running import run_and_show

__all__ = ["thermostat"]


def thermostat(
    stages: Annotated[
        str,
        typer.Option(
            help="law: the zoo at five learning rates. random: random problems at seven or more. alone: the "
            "thermostat from a fifth, one and five times the best. after: with what find_lr has found."
        ),
    ] = "law,random,alone,after",
    problems: Annotated[str, typer.Option(help="Comma-separated (default: all).")] = "",
    seeds: Seeds = 1,
    jobs: Jobs = 1,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/thermostat"),
    is_table: Annotated[
        bool, typer.Option("--table", help="Print the tables of what is there, without running.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Measure what averaging the weights of a round gains, and steer the learning rate by it.

    Runs that are in the folder are not repeated, so that a study that was stopped goes on.
    """
    from research.thermostat.experiment import open_ledger, run_study
    from research.thermostat.summary import law_tables
    from research.thermostat.verdict import loop_tables

    with usage_errors():
        run = partial(
            run_study,
            out,
            problems=[name for name in problems.split(",") if name],
            seeds=range(seeds),
            stages=[stage for stage in stages.split(",") if stage],
            num_jobs=jobs,
        )

        def show() -> str:
            records = open_ledger(out).records
            return f"{law_tables(records)}\n\n{loop_tables(records)}"

        run_and_show("thermostat", None if is_table else run, show, quiet=quiet)

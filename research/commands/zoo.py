"""``python -m research zoo``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hdet.lab.cli.options import Jobs, Quiet, Seeds
from hdet.lab.cli.screen import numbers, usage_errors
from research.commands.running import run_and_show

if TYPE_CHECKING:
    from research.zoo.problem import Split

__all__ = ["SPLITS", "zoo"]

SPLITS: dict[str, Split | None] = {"dev": "dev", "held-out": "held out", "all": None}


def zoo(
    methods: Annotated[
        str, typer.Option(help="Comma-separated; compare --methods help says what there is.")
    ] = "hdet_find_on_top,hdet_find,plain_tail",
    split: Annotated[str, typer.Option(help="dev, held-out, or all.")] = "all",
    problems: Annotated[str, typer.Option(help="Comma-separated (default: all of the split).")] = "",
    starts: Annotated[
        str, typer.Option(help="Starting LRs, comma-separated, as factors on the best of the sweep.")
    ] = "0.01,0.1,1,10,100",
    seeds: Seeds = 2,
    jobs: Jobs = 0,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/zoo"),
    is_table: Annotated[
        bool, typer.Option("--table", help="Print the tables of what is there, without running.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Judge finders on small real problems, some of them held out.

    Every problem is swept first: learning rates a factor of 1.33 apart and warm-ups of 10 and 40 %, with the
    tail. The best is run again on fresh seeds. Every method then trains from multiples of its learning rate.
    Runs that are in the folder are not repeated, so that a zoo that was stopped goes on.
    """
    from hdet.checks import require_choice
    from research.zoo.catalogue import names
    from research.zoo.experiment import open_ledger, run_zoo
    from research.zoo.summary import table

    with usage_errors():
        require_choice("--split", split, tuple(SPLITS))
        wanted = [name for name in problems.split(",") if name]
        for name in wanted:
            require_choice("--problems", name, tuple(names()))
        run = partial(
            run_zoo,
            methods=[method for method in methods.split(",") if method],
            split=SPLITS[split],
            problems=wanted,
            starts=numbers("--starts", starts),
            seeds=range(seeds),
            folder=out,
            num_jobs=jobs,
        )
        run_and_show(
            "zoo",
            None if is_table else run,
            lambda: table(open_ledger(out).records, seeds=range(seeds)),
            quiet=quiet,
        )

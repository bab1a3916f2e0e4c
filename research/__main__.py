"""``python -m research``: the commands that measure the library."""

from __future__ import annotations

import typer

from research.commands.ablate import ablate
from research.commands.claims import claims
from research.commands.compare import compare
from research.commands.explore import explore
from research.commands.recipe import recipe
from research.commands.thermostat import thermostat
from research.commands.zoo import zoo

app = typer.Typer(
    help="Measure hdet: against other methods, and against the claims of the paper.",
    epilog="Exit codes: 0 done, 1 a run failed, 2 bad arguments, 130 stopped; what is done is kept.",
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)
for command in (compare, zoo, explore, thermostat, recipe, ablate, claims):
    app.command()(command)


if __name__ == "__main__":
    app(prog_name="python -m research")

"""The ``hdet`` command and its subcommands.

A command imports torch, and what needs it, in its function, so that ``--help`` does not wait for torch.
"""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

import hdet
from hdet.lab.cli.doctor import doctor
from hdet.lab.cli.plan import plan
from hdet.lab.cli.report import report
from hdet.lab.cli.resume import resume
from hdet.lab.cli.run import run
from hdet.lab.cli.sweep import sweep

app = typer.Typer(
    help="Find the learning rate, train with it, and see what was found.",
    epilog="Exit codes: 0 done. 1 training or a check failed. 2 an argument or a file is not right. "
    "3 training diverged. 130 stopped.",
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (run, resume, sweep, report, doctor, plan):
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    app.command(help="\n\n".join(" ".join(lines.split()) for lines in paragraphs))(command)


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        print(hdet.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit

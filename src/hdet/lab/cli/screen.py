"""Screen shows progress, tables, errors and JSON; Exit holds the codes that commands end with."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich import progress as bars
from rich.console import Console
from rich.table import Table

from hdet.errors import HdetError, HdetWarning


class Exit:
    """Exit codes of every command."""

    OK = 0
    FAILED = 1
    """Training failed: a loss or the parameters are not finite."""
    DIVERGED = 3
    """Training ended above its first held-out loss."""
    USAGE = 2
    """An argument or a file is not right; nothing was changed."""
    STOPPED = 130
    """Ctrl-C; the run was saved and can be resumed."""

    @classmethod
    def of(cls, status: str) -> int:
        """Give the code of a run that has ended so."""
        return cls.OK if status == "finished" else getattr(cls, status.upper())


class Screen:
    """Writes what a command says: people read stderr or the terminal, machines read stdout.

    Args:
        is_json: one JSON object on stdout, everything else on stderr.
        is_quiet: nothing but errors (and the JSON).
    """

    def __init__(self, *, is_json: bool, is_quiet: bool) -> None:
        self.is_json = is_json
        self.console = Console(stderr=is_json, quiet=is_quiet, highlight=False)

    def say(self, text: str) -> None:
        """Print one line for people; square brackets in it are only that."""
        self.console.print(text, markup=False, emoji=False, soft_wrap=True)

    def show(self, columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
        """Print a table for people; one with a title has lines."""
        table = Table(*columns, title=title or None, title_justify="left", show_header=bool(columns))
        if not title:
            table.box = None
            table.pad_edge = False
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def give(self, data: Mapping[str, Any]) -> None:
        """Print the object for machines."""
        if self.is_json:
            print(json.dumps(data), flush=True)

    @property
    def shows_progress(self) -> bool:
        """Tell whether there is a terminal for a bar."""
        return self.console.is_terminal and not self.console.quiet

    @contextmanager
    def progress(self, total: int, label: str, *, shows_loss: bool = True) -> Iterator[_Bar]:
        """Show a live bar on a terminal, nothing elsewhere."""
        columns = [
            bars.SpinnerColumn(),
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=24),
            bars.MofNCompleteColumn(),
            *([bars.TextColumn("loss {task.fields[loss]}  lr {task.fields[lr]}")] if shows_loss else []),
            bars.TimeRemainingColumn(),
        ]
        hides = not self.shows_progress
        with bars.Progress(*columns, console=self.console, disable=hides, transient=True) as progress:
            yield _Bar(progress, progress.add_task(label, total=total, loss="-", lr="-"))


@dataclass(frozen=True)
class _Bar:
    progress: bars.Progress
    task: bars.TaskID

    def begin(self, label: str) -> None:
        """Begin the next phase, from zero on."""
        self.progress.reset(self.task, description=label)

    def update(self, completed: int, loss: float = math.nan, lr: float = math.nan) -> None:
        """Show how far it is."""
        self.progress.update(self.task, completed=completed, loss=number(loss), lr=number(lr))


def number(value: object, digits: int = 4) -> str:
    """Write a number as people read it.

    >>> number(0.123456), number(3e-5), number(None), number(12)
    ('0.1235', '3e-05', '-', '12')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def numbers(flag: str, text: str) -> list[float]:
    """Read the numbers of a comma-separated option.

    >>> numbers("--starts", "0.1,1")
    [0.1, 1.0]
    """
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{flag} must be numbers with commas between them, got {text!r}") from None


_OPTIONS = {
    "bandwidth_bytes_per_second": "bandwidth",
    "num_jobs": "jobs",
    "num_replicas": "replicas",
    "num_shards": "shards",
    "studies": "study",
    "total_steps": "steps",
}
"""Options by the names that the library has for them."""
_REMEDIES = {
    "probe": "leave held_out_weight_decay out, or use a task with a larger probe_batch()",
    "weight_decay": "pass --weight-decay 0.03",
}
"""What a user of the command can do about a warning, by its argument."""


def show_warnings_plainly() -> None:
    """Show hdet's warnings in one line, without the line of code that led to them. For this whole process."""
    as_python_does = warnings.formatwarning

    def one_line(message: Warning | str, category: type[Warning], *place: Any) -> str:
        if not isinstance(message, HdetWarning):
            return as_python_does(message, category, *place)
        here = _REMEDIES.get(message.argument, message.remedy)
        return f"hdet: warning: {str(message).removesuffix(message.remedy)}{here if message.remedy else ''}\n"

    warnings.formatwarning = one_line


@contextmanager
def usage_errors(options: Collection[str] = ()) -> Iterator[None]:
    """Turn the errors of bad input into one line and exit code 2, and Ctrl-C into one and 130.

    Args:
        options: of the command. An argument of this name is told as the option.
    """
    try:
        yield
    except (ValueError, TypeError, OSError, HdetError) as error:
        if os.environ.get("HDET_DEBUG"):
            raise
        kind = "" if isinstance(error, (ValueError, HdetError)) else f"{type(error).__name__}: "
        text, argument = str(error), getattr(error, "argument", "")
        if argument in options or argument in _OPTIONS:
            option = "--" + _OPTIONS.get(argument, argument).replace("_", "-")
            text = option + text.removeprefix(argument)
        print(f"hdet: {kind}{text}", file=sys.stderr)
        raise typer.Exit(Exit.USAGE) from None
    except KeyboardInterrupt:
        print("hdet: stopped", file=sys.stderr)
        raise typer.Exit(Exit.STOPPED) from None


def write_report(folders: list[Path], out: Path, screen: Screen) -> Path | None:
    """Write the page at the end of a run. A run is not lost because its page cannot be drawn."""
    try:
        from hdet.lab.page import build_report, read_run

        return build_report([read_run(folder) for folder in folders], out)
    except (HdetError, OSError, ValueError) as error:
        screen.say(f"no report: {error}")
        return None

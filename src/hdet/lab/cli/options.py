"""Options of the commands: those that several share, and those that are the fields of a dataclass."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer

Tracker = Enum("Tracker", {name: name for name in ("tensorboard", "wandb")}, type=str)

TaskName = Annotated[str, typer.Option(help="feed, charlm, digits, quadratic, or path/to/file.py:MyTask.")]
TaskOptions = Annotated[
    list[str] | None, typer.Option("--option", help="An option of the task: NAME=VALUE. Repeatable.")
]
Ranks = Annotated[int | None, typer.Option(min=2, help="Processes of this machine, one replica each.")]
Seeds = Annotated[int, typer.Option(help="Seeds of weights and batches, from 0 on.")]
Jobs = Annotated[int, typer.Option(help="Runs at a time. 0 gives one per core.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, all else on stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto for the GPU if there is one.")]


def _folder(text: str) -> Path:
    if not text:
        raise typer.BadParameter("it must be a folder, got '': name one, or . for this one")
    return Path(text)


FOLDER: Any = {"parser": _folder, "metavar": "PATH"}
"""Of options that name a folder or a page: an empty text would be the current folder."""
Track = Annotated[list[Tracker] | None, typer.Option(help="Write records there too. Repeatable.")]


def takes(
    settings: type, panels: Mapping[str, Sequence[str]] | None = None, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take fields of a dataclass as options, in ``**settings``, before those of its own.

    What the docstring of the dataclass says of each below ``Args:`` is the help of its option. A dictionary
    is given as NAME=VALUE, several times. Words are not checked here: the dataclass says what they may be.

    Args:
        settings: the dataclass.
        panels: headings of the help, and the fields that stand below each; all fields below none by default.
        defaults: of options, where they are not those of the fields.
    """
    _, _, arguments = inspect.cleandoc(settings.__doc__ or "").partition("\nArgs:\n")
    helps = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE))
    kinds = get_type_hints(settings)
    fields = {field.name: field.default for field in dataclasses.fields(settings)} | defaults
    options = []
    for heading, name in [(h, name) for h, names in (panels or {"": fields}).items() for name in names]:
        kind, default = kinds[name], fields[name]
        if get_origin(kind) is dict:
            kind, default = list[str], None
        elif get_origin(kind) in (Literal, tuple):
            kind = str
        if default is None:
            kind = kind | None
        flags = [f"--{name.replace('_', '-')}"] if default is False else []  # nobody needs to say no
        told, is_long = (
            " ".join(helps.get(name, "").split()),
            isinstance(default, float) and len(str(default)) > 6,
        )
        told = f"{told.rstrip('.')} (default: {default:.3g})." if is_long else told
        option = typer.Option(*flags, help=told, rich_help_panel=heading or None, show_default=not is_long)
        default = inspect.Parameter.empty if default is dataclasses.MISSING else default
        option = Annotated[kind, option]
        options.append(inspect.Parameter(name, _KEYWORD, default=default, annotation=option))

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        *own, _ = inspect.signature(command, eval_str=True).parameters.values()
        given = [parameter.replace(kind=_KEYWORD) for parameter in own]
        vars(command)["__signature__"] = inspect.Signature([*options, *given])
        return command

    return with_options


_KEYWORD = inspect.Parameter.KEYWORD_ONLY

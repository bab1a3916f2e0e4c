"""Options of the commands: those that several share, and those that are the fields of a dataclass."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer

Tracker = Enum("Tracker", {name: name for name in ("tensorboard", "wandb")}, type=str)

TaskName = Annotated[str, typer.Option(help="feed, charlm, digits, quadratic, or path/to/file.py:MyTask.")]
TaskOptions = Annotated[
    list[str] | None, typer.Option("--option", help="An option of the task: NAME=VALUE. Repeatable.")
]
Seeds = Annotated[int, typer.Option(help="Seeds of weights and batches, from 0 on.")]
Jobs = Annotated[int, typer.Option(help="Runs at a time. 0 gives one per core.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, all else on stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto for the GPU if there is one.")]
Track = Annotated[list[Tracker] | None, typer.Option(help="Write records there too. Repeatable.")]


def takes(
    settings: type, panels: Mapping[str, Sequence[str]] | None = None, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take the fields of a dataclass as options, in ``**settings``, before those of its own.

    The sentences under each field, up to an empty line, are the help of its option. A dictionary is given as
    NAME=VALUE, several times. Words are not checked here: the dataclass says what they may be.

    Args:
        settings: the dataclass.
        panels: headings of the help, and the fields that stand below each.
        defaults: of options, where they are not those of the fields.
    """
    source: Any = ast.parse(inspect.getsource(settings)).body[0]
    helps = {
        ast.unparse(field.target): " ".join(ast.literal_eval(words.value).split("\n\n")[0].split())
        for field, words in itertools.pairwise(source.body)
        if isinstance(field, ast.AnnAssign) and isinstance(words, ast.Expr)
    }
    headings = {name: heading for heading, names in (panels or {}).items() for name in names}
    hints: dict[str, Any] = get_type_hints(settings)
    fields = {field.name: field for field in dataclasses.fields(settings)}
    options = []
    for name in dict.fromkeys([*headings, *fields]):
        hint, default = hints[name], defaults.get(name, fields[name].default)
        if get_origin(hint) is Literal:
            hint = str
        elif get_origin(hint) is dict:
            hint, default = list[str], None
        elif get_origin(hint) is tuple:
            hint = str
        if default is None:
            hint = hint | None
        flags = [f"--{name.replace('_', '-')}"] if default is False else []  # nobody needs to say no
        told, is_long = helps[name], isinstance(default, float) and len(str(default)) > 6
        told = f"{told.rstrip('.')} (default: {default:.3g})." if is_long else told
        panel = headings.get(name)
        option = typer.Option(*flags, help=told, rich_help_panel=panel, show_default=not is_long)
        default = inspect.Parameter.empty if default is dataclasses.MISSING else default
        option = Annotated[hint, option]
        options.append(inspect.Parameter(name, _KEYWORD, default=default, annotation=option))

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        *own, _ = inspect.signature(command, eval_str=True).parameters.values()
        given = {parameter.name: parameter.replace(kind=_KEYWORD) for parameter in own}
        before = [option for option in options if option.name not in given]
        vars(command)["__signature__"] = inspect.Signature([*before, *given.values()])
        return command

    return with_options


_KEYWORD = inspect.Parameter.KEYWORD_ONLY

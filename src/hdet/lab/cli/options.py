"""Options that several commands share."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer


class Tracker(str, Enum):
    """Where records go as well."""

    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"


TaskName = Annotated[str, typer.Option(help="feed, charlm, digits, quadratic, or path/to/file.py:MyTask.")]
TaskOptions = Annotated[list[str] | None, typer.Option(help="An option of the task: NAME=VALUE. Repeatable.")]
Seeds = Annotated[int, typer.Option(help="Seeds of weights and batches, from 0 on.")]
Jobs = Annotated[int, typer.Option(help="Runs at a time. 0 gives one per core.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, all else on stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto for the GPU if there is one.")]
Live = Annotated[
    bool, typer.Option("--live", help="Write the page again while the run trains, to watch in a browser.")
]
Track = Annotated[list[Tracker] | None, typer.Option(help="Write records there too. Repeatable.")]

"""``hdet resume``."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import typer

from hdet.lab.cli.options import Device, Json, Live, Quiet, Track
from hdet.lab.cli.output import Exit, usage_errors


def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that was stopped.")],
    live: Live = False,
    track: Track = None,
    device: Device = "auto",
    is_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a run from its last checkpoint.

    It ends bit-exactly as it would have without the stop. A run without a checkpoint begins anew.
    """
    from hdet.lab.cli.launch import is_rank
    from hdet.lab.cli.training import screen_of_rank, train_and_report
    from hdet.lab.train.folder import RunFolder

    screen = screen_of_rank(is_json, quiet)
    with usage_errors():
        config = RunFolder(folder).read_config()
        if is_rank():
            config = dataclasses.replace(config, engine="torchrun", replicas=int(os.environ["WORLD_SIZE"]))
        is_begun = RunFolder(folder).has_checkpoint
        result = RunFolder(folder).read_result()
        if is_begun and result is not None and result["status"] in ("finished", "diverged"):
            screen.say(f"{folder} has {result['status']}: there is nothing to go on with")
            screen.give(result)
            raise typer.Exit(Exit.of(result["status"]))
    train_and_report(
        config, folder, screen, resume=is_begun, trackers=track or [], device=device, is_live=live
    )

"""The process of a command: a rank of torchrun or not, its device, its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import typer


def is_rank() -> bool:
    """Tell whether torchrun has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_writer() -> bool:
    """Tell whether this process writes and speaks: all do but the ranks above zero."""
    return not is_rank() or os.environ["RANK"] == "0"


def leave(code: int) -> NoReturn:
    """End this command with an exit code. A rank ends at once.

    It has said and written all by now. While the interpreter ends, a thread of a gloo group can abort the
    process, and torchrun would take that for a failure of the run.
    """
    if is_rank():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


@contextmanager
def in_ranks(path: Path) -> Iterator[Path]:
    """Join the other ranks for the length of the block; yields rank zero's path."""
    if not is_rank():
        yield path
        return
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if has_gpu else "gloo")
    try:
        shared = [str(path)]
        dist.broadcast_object_list(shared, src=0)
        yield Path(shared[0])
        dist.barrier()  # a rank that leaves while others still talk breaks their connections
    finally:
        dist.destroy_process_group()


def chosen_device(name: str) -> str:
    """Choose the device: ``auto`` is this process's GPU if there is one."""
    if name != "auto":
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"device must be one that this machine has, got {name!r}: {reason}") from error
        return name
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"

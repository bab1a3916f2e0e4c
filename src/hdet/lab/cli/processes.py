"""The process of a command: a rank of torchrun or not, its device, its end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import typer

from hdet.lab.pool import stop_on_signal

_STORE = "HDET_STORE"
"""Tells ranks in which file they meet."""


def is_rank() -> bool:
    """Tell whether torchrun, or :func:`start_ranks`, has started this process."""
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


def start_ranks(count: int | None) -> None:
    """Run this command again in so many processes of this machine, and end as they do. A rank goes on.

    torchrun opens stores to every network. These meet in a file of this user, and talk through loopback.
    """
    if count is None or is_rank():
        return
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    with tempfile.TemporaryDirectory(prefix="hdet-") as folder, stop_on_signal() as should_stop:
        told = {_STORE: f"file://{folder}/store", "WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": loopback}
        command = [sys.executable, "-m", "hdet", *sys.argv[1:]]
        ranks = [
            subprocess.Popen(command, env={**os.environ, **told, "RANK": rank, "LOCAL_RANK": rank})
            for rank in map(str, range(count))
        ]
        is_told = False
        while any(rank.poll() is None for rank in ranks):
            if should_stop() and not is_told:  # a Ctrl-C has reached them too, and one more changes nothing
                is_told = True
                for rank in ranks:
                    rank.terminate()
            time.sleep(0.05)
    raise typer.Exit(next((abs(rank.returncode) for rank in ranks if rank.returncode), 0))


@contextmanager
def in_ranks(path: Path) -> Iterator[Path]:
    """Join the other ranks for the length of the block; yields rank zero's path."""
    if not is_rank():
        yield path
        return
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    told = {"init_method": os.environ[_STORE], **place} if _STORE in os.environ else {}
    dist.init_process_group("nccl" if has_gpu else "gloo", **told)
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

"""Processes and signals: torchrun, ranks, and a Ctrl-C that saves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import typer

from hdet.lab.pool import Interrupted, stop_on_signal


def is_rank() -> bool:
    """Tell whether torchrun has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


_PIDS = "HDET_RANK_PIDS"
"""Names the folder in which ranks that :func:`launch` has started leave their process ids."""


def launch(arguments: Sequence[str], num_processes: int) -> tuple[int, bool]:
    """Start this command on every rank of this machine and wait.

    A Ctrl-C is passed on to the ranks, not to torchrun, which would end them with a traceback. A second one
    ends everything at once.

    Returns:
        The exit code of torchrun, and whether a stop was asked for.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(num_processes), "-m", "hdet", *arguments),
    ]
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    # Ranks that torchrun starts again must not read what those before left in its store (pytorch#135712).
    environment.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with tempfile.TemporaryDirectory() as folder, stop_on_signal() as should_stop:
        # In a session of its own a Ctrl-C of the terminal reaches this process alone.
        process = subprocess.Popen(command, env=environment | {_PIDS: folder}, start_new_session=True)
        is_told = False
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout=0.1), should_stop()
                can_hear = len(list(Path(folder).iterdir())) == num_processes
                if should_stop() and can_hear and not is_told:
                    _send(folder, signal.SIGINT)
                    is_told = True
        except Interrupted:
            process.kill()
            _send(folder, signal.SIGKILL)
            return process.wait(), True


def _send(folder: str, number: int) -> None:
    """Send a signal to the ranks that have left their process ids."""
    for file in Path(folder).iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.name), number)


def is_launched() -> bool:
    """Tell whether :func:`launch` has started this rank. It reads the result, so codes are not needed."""
    return is_rank() and _PIDS in os.environ


def leave(code: int) -> NoReturn:
    """End this command with an exit code. A rank ends at once; one of :func:`launch` with zero.

    A rank has said and written all by now. While the interpreter ends, a thread of a gloo group can abort the
    process, and torchrun would take that for a failure of the run.
    """
    if is_rank():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if is_launched() else code)
    raise typer.Exit(code)


def hears_signals() -> None:
    """Tell who has launched this rank that it handles signals now."""
    if is_launched():
        (Path(os.environ[_PIDS]) / str(os.getpid())).touch()


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

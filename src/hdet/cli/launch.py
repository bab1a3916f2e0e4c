"""Processes and signals: torchrun, ranks, and a Ctrl-C that saves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["chosen_device", "in_ranks", "is_rank", "launch"]


def is_rank() -> bool:
    """Whether torchrun has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(arguments: Sequence[str], num_processes: int) -> int:
    """Start this command on every rank of this machine and wait; the exit code of torchrun."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(num_processes), "-m", "hdet", *arguments),
    ]
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    # Ranks that torchrun starts again must not read what those before left in its store (pytorch#135712).
    environment.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # In a session of its own a Ctrl-C reaches this process alone, which passes it on once: the ranks save.
    process = subprocess.Popen(command, env=environment, start_new_session=True)

    def forward(number: int, _: object) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def in_ranks(path: Path | None) -> Iterator[Path | None]:
    """Join the other ranks for the length of the block; yields rank zero's path."""
    if not is_rank():
        yield path
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group(backend)
    try:
        yield _path_of_rank_zero(path)
        dist.barrier()  # a rank that leaves while others still talk breaks their connections
    finally:
        dist.destroy_process_group()


def _path_of_rank_zero(path: Path | None) -> Path:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    text = str(path).encode() if dist.get_rank() == 0 else b""
    length = torch.tensor([len(text)], device=device)
    dist.broadcast(length, src=0)
    letters = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if text:
        letters.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(letters, src=0)
    return Path(bytes(letters.tolist()).decode())


def chosen_device(name: str) -> str:
    """``auto`` is this process's GPU if there is one."""
    if name != "auto":
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"device must be one that this machine has, got {name!r}: {reason}") from error
        return name
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"

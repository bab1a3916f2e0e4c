"""Run a function on real gloo processes. They start once per test run and are used again."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["ReplicaError", "end_processes", "forkserver", "run_replicas"]


class ReplicaError(AssertionError):
    """A replica raised; the message holds its traceback."""


class _Worker:
    def __init__(self, context: Any) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()


_workers: list[_Worker] = []


def run_replicas(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 60
) -> list[Any]:
    """Call ``fn(rank, *args)`` on ``world_size`` processes joined by gloo; return what each returned."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler is chatty
    context = forkserver()
    while len(_workers) < world_size:
        _workers.append(_Worker(context))
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        try:
            for rank in range(world_size):
                _workers[rank].connection.send_bytes(pickle.dumps((fn, rank, world_size, store, args)))
            answers = [_receive(_workers[rank], timeout_seconds) for rank in range(world_size)]
        except BaseException:
            end_processes()  # the next call must not get the answers of this one
            raise
    errors = [text for is_error, text in answers if is_error]
    if errors:
        raise ReplicaError("\n".join(errors))
    return [result for _, result in answers]


def forkserver() -> Any:
    """Starts processes that have torch, and what its optimizers import at their first step."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "hdet.auto"]
    )
    return context


def end_processes() -> None:
    """End all processes: the next call starts new ones."""
    for worker in _workers:
        worker.process.kill()
    _workers.clear()


def _receive(worker: _Worker, timeout_seconds: float) -> tuple[bool, Any]:
    if not worker.connection.poll(timeout_seconds):
        for each in _workers:  # all say on stderr where they are
            os.kill(each.process.pid, signal.SIGUSR1)
        time.sleep(1)
        answers = [pickle.loads(each.connection.recv_bytes()) for each in _workers if each.connection.poll()]
        errors = [text for is_error, text in answers if is_error]  # for which this one waits, maybe
        raise ReplicaError(
            "\n".join([f"no answer within {timeout_seconds} s: stderr says where each rank is", *errors])
        )
    return pickle.loads(worker.connection.recv_bytes())


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        fn, rank, world_size, path, args = pickle.loads(message)
        limit = timedelta(seconds=30)
        try:
            store = dist.FileStore(path, world_size)
            store.set_timeout(limit)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
            del store  # the group keeps it, and gives it up with itself
            torch.manual_seed(0)
            answer = (False, fn(rank, *args))
        except BaseException:
            answer = (True, f"--- rank {rank}\n{traceback.format_exc()}")
        finally:
            gc.collect()  # what a test left in a circle must not hold the group when it ends
            if dist.is_initialized():
                dist.destroy_process_group()
        connection.send_bytes(pickle.dumps(answer))

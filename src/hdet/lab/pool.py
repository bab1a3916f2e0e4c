"""Pool: worker processes for runs that do not depend on each other, and a Ctrl-C that saves."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from hdet.checks import require_count

_Result = TypeVar("_Result")
_Future = Future[tuple[_Result] | None]


class Pool:
    """Processes with one thread each, which start at the first need and serve to the end of the block.

    A terminal sends Ctrl-C to the workers too. They hear it only where a job says so: see
    :func:`interruptible`.

    Args:
        num_jobs: how many jobs at a time; 0 for one per core.
    """

    def __init__(self, num_jobs: int = 0) -> None:
        self.num_jobs = require_count("num_jobs", num_jobs, at_least=0) or os.cpu_count() or 1
        context = multiprocessing.get_context("spawn")  # processes start with the first jobs
        self._executor = ProcessPoolExecutor(self.num_jobs, context, initializer=_use_one_thread)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def run(
        self,
        function: Callable[..., _Result],
        jobs: Sequence[tuple[Any, ...]],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, _Result]]:
        """Give the results as they come, each with the place of its job.

        After a stop no job is started. Those under way are waited for, and their results are given too.

        Args:
            function: what a worker calls; a process must be able to import it.
            jobs: its arguments, one tuple per call.
            should_stop: asked before a job is started.
        """
        left, waiting = deque(enumerate(jobs)), dict[_Future[_Result], int]()
        while True:
            # No more than are under way: what an executor has queued cannot all be called off.
            while left and len(waiting) < self.num_jobs:
                if should_stop():  # asked again after each: it may come while a worker is started
                    left.clear()
                    break
                place, arguments = left.popleft()
                # A process inherits the mask: a Ctrl-C while it starts waits for a job that hears it.
                with _mask("SIG_BLOCK"):
                    waiting[self._executor.submit(_call, function, arguments)] = place
            if not waiting:
                return
            finished, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in finished:
                place, result = waiting.pop(future), future.result()
                if result is not None:
                    yield place, result[0]


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


_was_interrupted = False
"""True once this worker has heard a Ctrl-C: the next job was given to it before the stop, and is left."""


def _call(function: Callable[..., _Result], arguments: tuple[Any, ...]) -> tuple[_Result] | None:
    return None if _was_interrupted else (function(*arguments),)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let the worker of a job hear Ctrl-C within the block, one that came just before included.

    What Ctrl-C does is up to the handler, which must be set before. Outside of a worker this changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)

    def hear(number: int, frame: FrameType | None) -> None:
        global _was_interrupted
        _was_interrupted = True
        if callable(handler):
            handler(number, frame)

    signal.signal(signal.SIGINT, hear)
    try:
        with _mask("SIG_UNBLOCK"):
            yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def _mask(how: str) -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(getattr(signal, how), {signal.SIGINT})  # raises what was waiting
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Interrupted(KeyboardInterrupt):
    """A signal that ends at once.

    A class of its own: where a plain KeyboardInterrupt has passed through ``exec``, Python ends itself by the
    signal later on, whatever exit code was asked for.
    """


@contextmanager
def stop_on_signal(
    *, insist: bool = True, ends_at_once: Callable[[], bool] = lambda: False
) -> Iterator[Callable[[], bool]]:
    """Within the block a Ctrl-C (or SIGTERM) asks for a stop; yields a function that tells whether it came.

    Args:
        insist: a second Ctrl-C ends at once.
        ends_at_once: asked when a signal comes; whether there is nothing to save, so that it ends at once.
    """
    asked = False

    def handle(number: int, _: object) -> None:
        nonlocal asked
        is_repeated, asked = asked, True
        if (is_repeated and insist and number == signal.SIGINT) or ends_at_once():
            raise Interrupted

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

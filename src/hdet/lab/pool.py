"""Pool: worker processes for runs that do not depend on each other, and a Ctrl-C that asks for a stop."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from hdet.checks import require_count

_Result = TypeVar("_Result")


class Pool:
    """Processes with one thread each, which start at the first need and serve to the end of the block.

    A terminal sends Ctrl-C to the workers too. They do not hear it: :meth:`run` ends them.

    Args:
        num_jobs: how many jobs at a time; 0 for one per core.
    """

    def __init__(self, num_jobs: int = 0) -> None:
        self.num_jobs = require_count("num_jobs", num_jobs, at_least=0) or os.cpu_count() or 1
        context = multiprocessing.get_context("spawn")  # processes start with the first jobs
        self._executor = ProcessPoolExecutor(self.num_jobs, context, initializer=_use_one_thread)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self._end_jobs()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def run(
        self,
        function: Callable[..., _Result],
        jobs: Sequence[tuple[Any, ...]],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, _Result]]:
        """Give the results as they come, each with the place of its job.

        After a stop the jobs that are under way end without a result, and the pool takes no others.

        Args:
            function: what a worker calls; a process must be able to import it.
            jobs: its arguments, one tuple per call.
            should_stop: asked now and then.
        """
        if should_stop():
            return
        with _blocked_ctrl_c():  # processes that are started inherit this, for good
            waiting = {self._executor.submit(function, *job): place for place, job in enumerate(jobs)}
        while waiting:
            finished, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in finished:
                yield waiting.pop(future), future.result()
            if waiting and should_stop():
                self._end_jobs()
                return

    def _end_jobs(self) -> None:
        for process in [*(self._executor._processes or {}).values()]:  # noqa: SLF001
            process.terminate()


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@contextmanager
def _blocked_ctrl_c() -> Iterator[None]:
    """Let a Ctrl-C wait until the end of the block."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
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

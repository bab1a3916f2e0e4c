"""Time methods against each other in one process, a few steps of each in turn: noise meets all alike."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from hdet.errors import HdetError
from hdet.lab.tasks.task import Task
from research.peers.base import Diverged, Job, Method

__all__ = ["seconds_in_turn"]

_STEPS_PER_TURN = 10


def seconds_in_turn(methods: Sequence[Method], job: Job) -> list[float | None]:
    """The time that each method takes for the job, from building the model to the last evaluation.

    None for one that diverged, and so ended early. Results are thrown away: torch's own generator, which
    dropout draws from, serves all of them.

    Args:
        methods: what to time; each has a thread, of which one runs at a time.
        job: for each of them.
    """
    relay = _Relay(len(methods))
    errors: list[BaseException | None] = [None] * len(methods)

    def run(place: int) -> None:
        try:
            relay.wait(place)
            methods[place].run(replace(job, task=relay.in_turn(job.task, place)))
        except BaseException as error:
            errors[place] = error
        finally:
            relay.leave(place)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(methods))]
    with torch.random.fork_rng(devices=[]):
        try:
            for thread in threads:
                thread.start()
            relay.wait_for_all()
        finally:
            # A join that Ctrl-C interrupts takes the thread for ended: wait for what they say themselves.
            relay.stop()
            relay.wait_for_all(sum(thread.ident is not None for thread in threads))
            for thread in threads:
                if thread.ident is not None:  # it was started
                    thread.join()
    for method, error in zip(methods, errors, strict=True):
        if error is not None and not isinstance(error, Diverged):
            raise HdetError(f"method {method.name!r} cannot run: {error}") from error
    return [s if error is None else None for s, error in zip(relay.seconds, errors, strict=True)]


class _Relay:
    """Hands the turn around, and adds up the time that each place has it."""

    def __init__(self, num_places: int) -> None:
        self.seconds = [0.0] * num_places
        self._left, self._turn, self._since = list(range(num_places)), 0, 0.0
        self._num_places, self._num_ended = num_places, 0
        self._is_stopped = False
        self._changed = threading.Condition()

    def wait(self, place: int) -> None:
        """Until it is this place's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == place or self._is_stopped)
            if self._is_stopped:
                raise KeyboardInterrupt
        self._since = time.perf_counter()

    def pass_on(self, place: int) -> None:
        """End this place's turn."""
        self.seconds[place] += time.perf_counter() - self._since
        with self._changed:
            others = [other for other in self._left if other > place] or self._left
            self._turn = others[0]
            self._changed.notify_all()

    def leave(self, place: int) -> None:
        """End this place's last turn."""
        if self._turn == place:
            self._left.remove(place)
            if self._left:
                self.pass_on(place)
            else:
                self.seconds[place] += time.perf_counter() - self._since
        with self._changed:
            self._num_ended += 1
            self._changed.notify_all()

    def wait_for_all(self, num_places: int | None = None) -> None:
        """Until this many have left, all of them by default."""
        wanted = self._num_places if num_places is None else num_places
        with self._changed:
            self._changed.wait_for(lambda: self._num_ended >= wanted)

    def stop(self) -> None:
        """Nobody gets another turn."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def in_turn(self, task: Task, place: int) -> Task:
        """The task, with a hand-over at every few steps: where the first replica takes its batch."""
        task, batches_of = copy.copy(task), task.train_batches

        def train_batches(*, seed: int, replica: int = 0, start: int = 0) -> Iterator[Any]:
            for step, batch in enumerate(batches_of(seed=seed, replica=replica, start=start), start=1):
                if replica == 0 and step % _STEPS_PER_TURN == 0:
                    self.pass_on(place)
                    self.wait(place)
                yield batch

        object.__setattr__(task, "train_batches", train_batches)  # tasks may be frozen dataclasses
        return task

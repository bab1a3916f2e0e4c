"""Windows: a log cut into sequences, and these into training, probe and evaluation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from hdet.lab.tasks.feed.events import Events
from hdet.lab.tasks.feed.logs import Log
from hdet.method.fan_out import derived_seed

SESSION_GAP_SECONDS = 1800.0
MIN_EVENTS = 10
PARTS = (0.8, 0.9)  # where the probe and the evaluation begin, as shares of the events


class Windows:
    """Sequences of at most ``length`` events, each of one user in order of time.

    The split is by time: the first 80 % of all events are for training, the next 10 % for the probe, the last
    10 % for evaluation. No window crosses from one into another. A session ends where a user pauses for more
    than half an hour; sessions go on across windows. ``training``, ``probe`` and ``evaluation`` hold the
    numbers of the windows of each part.

    Args:
        log: the events.
        length: events in a window; shorter ones are padded.
        num_users: rows of the user table; numbers beyond it share rows (modulo).
        num_items: rows of the item table, likewise.
    """

    def __init__(self, log: Log, *, length: int, num_users: int, num_items: int) -> None:
        num_events = len(log.times)
        if num_events < MIN_EVENTS:
            raise ValueError(
                f"log must have at least {MIN_EVENTS} rows that can be read, got {num_events}: they are "
                "split into training, probe and evaluation"
            )
        part = np.empty(num_events, dtype=np.int8)
        by_time = np.argsort(log.times, kind="stable")
        part[by_time] = np.searchsorted(PARTS, np.arange(num_events) / num_events, side="right")

        order = np.lexsort((log.times, log.users))  # stable: equal times stay in the order of the file
        users, times, part = log.users[order], log.times[order], part[order]
        begins_user = np.diff(users, prepend=-1) != 0
        begins_session = begins_user | (np.diff(times, prepend=0.0) > SESSION_GAP_SECONDS)
        in_session = _places(begins_session)
        in_run = _places(begins_user | (np.diff(part, prepend=-1) != 0))
        starts = np.flatnonzero(in_run % length == 0)

        self._length = length
        self._user = torch.from_numpy(users % num_users)
        self._item = torch.from_numpy(log.items[order] % num_items)
        self._position = torch.from_numpy(np.minimum(in_session, length - 1))
        self._actions = torch.from_numpy(log.actions[order])
        self._starts = torch.from_numpy(starts)
        self._counts = torch.from_numpy(np.diff(starts, append=num_events))
        parts = torch.from_numpy(part[starts].astype(np.int64))
        self.training, self.probe, self.evaluation = (torch.nonzero(parts == k).squeeze(1) for k in range(3))

    def events(self, windows: Tensor) -> Events:
        """The windows of these numbers, padded."""
        places = torch.arange(self._length)
        is_there = places < self._counts[windows].unsqueeze(1)
        index = torch.where(is_there, self._starts[windows].unsqueeze(1) + places, 0)
        return Events(
            user=self._user[self._starts[windows]],
            item=torch.where(is_there, self._item[index], 0),
            position=torch.where(is_there, self._position[index], 0),
            actions=self._actions[index] * is_there.unsqueeze(-1).float(),
            mask=is_there.float(),
        )

    def shuffled(self, batch_size: int, *, seed: int, replica: int, start: int) -> Iterator[Events]:
        """Batches of training windows without end: epoch after epoch, each in an order of its own."""
        count = len(self.training)
        orders: dict[int, Tensor] = {}
        step = start
        while True:
            places = torch.arange(step * batch_size, (step + 1) * batch_size)
            epochs = range(int(places[0]) // count, int(places[-1]) // count + 1)
            orders = {
                epoch: orders[epoch] if epoch in orders else self._order(seed, replica, epoch)
                for epoch in epochs
            }
            yield self.events(torch.cat([orders[e][places[places // count == e] % count] for e in epochs]))
            step += 1

    def _order(self, seed: int, replica: int, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(derived_seed(seed, "feed epoch", replica, epoch))
        return self.training[torch.randperm(len(self.training), generator=generator)]


def _places(begins: np.ndarray) -> np.ndarray:
    """How many places ago the last beginning was.

    >>> _places(np.array([True, False, False, True, False]))
    array([0, 1, 2, 0, 1])
    """
    index = np.arange(len(begins))
    return index - np.maximum.accumulate(np.where(begins, index, 0))

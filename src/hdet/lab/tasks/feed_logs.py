"""Real logs: a reader of CSV files, and Windows, which cuts a log into sequences."""

from __future__ import annotations

import csv
import itertools
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hdet.errors import bad_argument, warn
from hdet.lab.tasks.feed_world import Events
from hdet.lab.tasks.task import epoch_orders

MAX_BAD_SHARE = 0.2
NUM_SHOWN = 5
SESSION_GAP_SECONDS = 1800.0
MIN_EVENTS = 10
PARTS = (0.8, 0.9)  # where the probe and the evaluation begin, as shares of the events

COLUMNS = ("user", "item", "time", "contribution", "like", "dwell")
Row = tuple[str, str, float, list[bool]]
"""User, item, time in seconds, and whether the user contributed, liked, dwelt long."""


@dataclass(frozen=True)
class Log:
    """Events of a log, in the order of the file."""

    users: np.ndarray
    """Numbers of users, from 0 in order of appearance."""
    items: np.ndarray
    """Numbers of items, likewise."""
    times: np.ndarray
    """Seconds."""
    actions: np.ndarray
    """(num_events, 3) of zeros and ones: contribution, like, long dwell."""
    num_users: int
    """Number of different users."""
    num_items: int
    """Number of different items."""


def read_log(path: str | Path) -> Log:
    """Read a log row by row; rows that cannot be read are left out and reported.

    It has the columns ``user,item,time,contribution,like,dwell``, in any order, and there may be others.
    Times are in seconds, actions 0 or 1. Users and items may be any text.

    Args:
        path: the CSV file.

    Raises:
        ValueError: there is no such file, columns are missing, or more than a fifth of the rows are bad.

    Warns:
        HdetWarning: some rows are bad; it names the first of them by line.
    """
    path = Path(path)
    if not path.is_file():
        raise bad_argument("log", "must be a file that exists", repr(str(path)), "there is no such file")
    users: dict[str, int] = {}
    items: dict[str, int] = {}
    columns = array("q"), array("q"), array("d"), array("b")
    num_rows, bad = 0, []
    for line, row in _rows(path):
        num_rows += 1
        if isinstance(row, str):
            bad.append((line, row))
            continue
        user, item, time, actions = row
        columns[0].append(users.setdefault(user, len(users)))
        columns[1].append(items.setdefault(item, len(items)))
        columns[2].append(time)
        columns[3].extend(actions)
    _report(path, num_rows, bad)
    kinds = (np.int64, np.int64, np.float64, np.int8)
    u, i, t, a = (np.frombuffer(c, dtype=kind) for c, kind in zip(columns, kinds, strict=True))
    return Log(u, i, t, a.reshape(-1, 3), num_users=len(users), num_items=len(items))


def _rows(path: Path) -> Iterator[tuple[int, Row | str]]:
    """Line numbers with rows, or with what is wrong with them."""
    # Bytes that are no text make their own row bad, not the file; some tools write a mark at the beginning.
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header = [name.strip(' "\r\n') for name in file.readline().split(",")]
        if missing := [column for column in COLUMNS if column not in header]:
            raise ValueError(
                f"log {str(path)!r} must have the columns {','.join(COLUMNS)}, got {','.join(header)!r}: "
                f"{', '.join(missing)} missing"
            )
        places = [header.index(column) for column in COLUMNS]
        # Each line on its own: a quote that is never closed then spoils one row, not all that follow.
        for number, line in enumerate(file, start=2):
            if line.strip():
                try:
                    fields = next(csv.reader((line,), strict=True), [])
                    if len(fields) != len(header):
                        raise ValueError(f"{len(fields)} fields instead of {len(header)}")
                    yield number, _row([fields[place].strip() for place in places])
                except (ValueError, csv.Error) as error:
                    yield number, str(error)


def _row(fields: list[str]) -> Row:
    user, item, text, *actions = fields
    try:
        time = float(text)
    except ValueError:
        raise ValueError(f"time {text!r} is not a number") from None
    if not 0 <= time < math.inf:
        raise ValueError(f"time {text!r} is {'negative' if -math.inf < time < 0 else 'not finite'}")
    if bad := [action for action in actions if action not in ("0", "1", "0.0", "1.0")]:
        raise ValueError(f"action {bad[0]!r} is not 0 or 1")
    if not (user and item):
        raise ValueError("empty user or item")
    return user, item, time, [float(action) == 1 for action in actions]


def _report(path: Path, num_rows: int, bad: list[tuple[int, str]]) -> None:
    if num_rows and not bad:
        return
    shown = [f"line {line}: {reason}" for line, reason in bad[:NUM_SHOWN]]
    shown += [f"and {len(bad) - NUM_SHOWN} more"] * (len(bad) > NUM_SHOWN)
    text = f"{len(bad)} of {num_rows} rows cannot be read" + (f" ({'; '.join(shown)})" if bad else "")
    if not num_rows or len(bad) > MAX_BAD_SHARE * num_rows:
        raise ValueError(
            f"log {str(path)!r} must have rows, at most {MAX_BAD_SHARE:.0%} of them bad, but {text}: "
            "correct the file"
        )
    warn(f"log {str(path)!r}: {text}; they are left out")


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
        self.training = torch.nonzero(parts == 0).squeeze(1)
        self.probe = torch.nonzero(parts == 1).squeeze(1)
        self.evaluation = torch.nonzero(parts == 2).squeeze(1)

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
        order = epoch_orders(count, seed, "feed epoch", replica)
        for step in itertools.count(start):
            places = range(step * batch_size, (step + 1) * batch_size)
            chosen = torch.stack([order(place // count)[place % count] for place in places])
            yield self.events(self.training[chosen])


def _places(begins: np.ndarray) -> np.ndarray:
    """Count the places since the last beginning.

    >>> _places(np.array([True, False, False, True, False]))
    array([0, 1, 2, 0, 1])
    """
    index = np.arange(len(begins))
    return index - np.maximum.accumulate(np.where(begins, index, 0))

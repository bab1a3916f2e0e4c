"""A task of one's own: the feed ranker on events of a file.

hdet run --task examples/tasks/feed_log.py:FeedLog --option log=events.csv

The file has the columns user,item,time,contribution,like,dwell. Times are in seconds, actions 0 or 1.
"""

import csv
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hdet.lab.tasks.feed import Feed
from hdet.lab.tasks.feed_world import TARGETS, Events
from hdet.lab.tasks.task import epoch_orders

SESSION_GAP_SECONDS = 1800.0
PARTS = (0.8, 0.9)
"""Where the probe and the evaluation begin, as shares of the events in order of time."""
HELD_OUT_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class FeedLog(Feed):
    """Predict what users do with what they are shown, from a log that repeats epoch after epoch."""

    log: str
    """The CSV file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = sorted(_rows(self.log), key=lambda row: row[2])
        first, second = (int(share * len(rows)) for share in PARTS)
        parts = [self._windows(part) for part in (rows[:first], rows[first:second], rows[second:])]
        if not all(parts):
            raise ValueError(f"log must hold at least 10 events, got {len(rows)}: they are split in three")
        object.__setattr__(self, "_parts", parts)
        object.__setattr__(self, "num_examples", len(parts[0]))

    def _windows(self, rows: list[tuple[Any, ...]]) -> list[Events]:
        """Cut each user's events into sequences, the last one padded; more ids than rows share rows."""
        users = dict[str, list[tuple[Any, ...]]]()
        for row in rows:
            users.setdefault(row[0], []).append(row)
        windows = list[Events]()
        for user, events in users.items():
            positions, place, before = [], -1, events[0][2]
            for _, _, time, _ in events:
                place = 0 if time - before > SESSION_GAP_SECONDS else place + 1
                before = time
                positions.append(min(place, self.length - 1))
            for start in range(0, len(events), self.length):
                part = events[start : start + self.length]
                empty = [0] * (self.length - len(part))
                actions = [row[3] for row in part] + [[0] * len(TARGETS)] * len(empty)
                windows.append(
                    Events(
                        user=torch.tensor(_number(user) % self.num_users),
                        item=torch.tensor([_number(row[1]) % self.num_items for row in part] + empty),
                        position=torch.tensor(positions[start : start + self.length] + empty),
                        actions=torch.tensor(actions, dtype=torch.float32),
                        mask=torch.tensor([1.0] * len(part) + empty),
                    )
                )
        return windows

    def train_batches(self, *, seed: int, replica: int = 0, start: int = 0) -> Iterator[Events]:
        """Shuffled epochs, another order for every replica."""
        windows = self._part(0)
        order = epoch_orders(len(windows), seed, "feed epoch", replica)
        for step in itertools.count(start):
            places = range(step * self.batch_size, (step + 1) * self.batch_size)
            yield _stack([windows[order(k // len(windows))[k % len(windows)]] for k in places])

    def probe_batch(self) -> Events:
        """Events just before the evaluation's."""
        return _stack(self._part(1)[:HELD_OUT_SIZE])

    def evaluation_batches(self) -> list[Events]:
        """The last events of the log."""
        windows = self._part(2)
        return [_stack(windows[i : i + HELD_OUT_SIZE]) for i in range(0, len(windows), HELD_OUT_SIZE)]

    def _part(self, index: int) -> list[Events]:
        return vars(self)["_parts"][index]


def _rows(path: str) -> Iterator[tuple[str, str, float, list[int]]]:
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                yield row["user"], row["item"], float(row["time"]), [int(row[name]) for name in TARGETS]
        except (KeyError, TypeError, ValueError) as error:
            what = f"{type(error).__name__} {error}"
            raise ValueError(f"log {path}, line {reader.line_num}: {what}") from error


def _number(name: str) -> int:
    """The same number for the same name in every process."""
    return int.from_bytes(name.encode()[-8:], "big")


def _stack(windows: list[Events]) -> Any:
    return {name: torch.stack([window[name] for window in windows]) for name in windows[0]}

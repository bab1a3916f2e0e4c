"""What the replicas said: whether higher or lower values of a hyperparameter gave lower losses in a round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hdet.records import RoundRecord

_LEAST_ROUNDS = 8
"""Fewer rounds have no clear side."""
_LARGEST = 1e100
_MAX_PLACES = 17
_OfReplicas = Callable[[RoundRecord], Sequence[float | None]]


class Mean(NamedTuple):
    """A mean of ``num`` numbers with its standard error, at a place on an axis."""

    place: float
    mean: float
    error: float
    num: int


@dataclass(frozen=True)
class Said:
    """Losses of the replicas against their values of one hyperparameter, over the rounds of a run."""

    name: str
    rounds: list[tuple[int, float]]
    """Step, and loss at the highest value minus loss at the lowest, on the line fitted to the round."""
    width: float
    """Log of the highest value over the lowest."""
    places: list[Mean]
    """By value over the mean value: loss minus the mean loss of the round."""

    @property
    def difference(self) -> Mean:
        """Loss at the highest value minus loss at the lowest, over all rounds."""
        return mean_of([difference for _, difference in self.rounds])

    @property
    def slope(self) -> tuple[float, float]:
        """Slope of the loss on the log of the value, and its standard error."""
        return self.difference.mean / self.width, self.difference.error / self.width

    @property
    def side(self) -> str:
        """``higher`` or ``lower``, whichever gave lower losses; empty where that is within two errors."""
        _, mean, error, count = self.difference
        if count < _LEAST_ROUNDS or abs(mean) <= 2 * error:
            return ""
        return "higher" if mean < 0 else "lower"

    @property
    def verdict(self) -> str:
        """Name the side in a few words."""
        return f"{self.side} {self.name} did better" if self.side else f"no clear side of {self.name}"

    @property
    def sentence(self) -> str:
        """Say the verdict, and the difference that it rests on with its standard error."""
        _, mean, error, count = self.difference
        what = f"loss at the highest value minus the lowest {mean:+.2g} ± {error:.1g}"
        return f"{self.verdict[0].upper()}{self.verdict[1:]} ({what}, {count} rounds)."


def explored(records: Sequence[RoundRecord]) -> list[str]:
    """Names of the hyperparameters that differed between replicas, in their order."""
    spreads = (spread for record in records for spread in record.multipliers.items())
    return list(dict.fromkeys(name for name, factors in spreads if len(set(factors)) > 1))


def what_replicas_said(records: Sequence[RoundRecord]) -> list[Said]:
    """Tell of every explored hyperparameter which side did better within a round.

    In every round a line is fitted to the losses of the replicas over the log of their values. Losses are
    those on the probe where there is one. Replicas that were left out do not count.

    >>> spread = {"multipliers": {"lr": [0.9, 1.1]}, "values": {"lr": [0.009, 0.011]}}
    >>> record = RoundRecord(round=0, step=10, num_replicas=2, losses=[1.5, 1.2], **spread)
    >>> [said.verdict for said in what_replicas_said([record] * 9)]
    ['higher lr did better']
    """
    found = []
    for name in explored(records):
        rounds, widths = list[tuple[int, float]](), list[float]()
        for step, points in _rounds(records, name, scores_of):
            logs = [math.log(factor) for _, factor, _ in points]
            widths.append(max(logs) - min(logs))
            fitted = statistics.linear_regression(logs, [loss for _, _, loss in points])
            rounds.append((step, fitted.slope * widths[-1]))
        if len(rounds) > 1:
            places = means_by_place(records, name, scores_of)
            found.append(Said(name, rounds, statistics.fmean(widths), places))
    return found


def means_by_place(records: Sequence[RoundRecord], name: str, numbers_of: _OfReplicas) -> list[Mean]:
    """Numbers of the replicas, by value over the mean value, from the lowest to the highest."""
    places = dict[int, list[tuple[float, float]]]()
    for _, points in _rounds(records, name, numbers_of):
        for place, factor, number in points:
            places.setdefault(place, []).append((factor, number))
    return [
        mean_of([number for _, number in pairs], statistics.fmean(factor for factor, _ in pairs))
        for _, pairs in sorted(places.items())
    ]


def mean_of(numbers: Sequence[float], place: float = 0.0) -> Mean:
    """The mean of numbers with its standard error.

    >>> mean_of([1.0, 3.0])
    Mean(place=0.0, mean=2.0, error=1.0, num=2)
    """
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    return Mean(place, statistics.fmean(numbers), deviation / math.sqrt(len(numbers)), len(numbers))


def scores_of(record: RoundRecord) -> list[float | None]:
    """Loss of each replica that counted, on the probe where there is one, minus their mean."""
    scores = [
        None if s is None or not abs(s) < _LARGEST or r in record.excluded else s
        for r, s in enumerate(record.probes or record.losses)
    ]
    counted = [s for s in scores if s is not None]
    mean = math.fsum(counted) / max(1, len(counted))
    return [None if s is None else s - mean for s in scores]


def _rounds(
    records: Sequence[RoundRecord], name: str, numbers_of: _OfReplicas
) -> Iterator[tuple[int, list[tuple[int, float, float]]]]:
    """Step, and place, value over the mean value and number of each replica, where these can be compared."""
    for record in records:
        values, numbers = record.values.get(name) or record.multipliers.get(name, []), numbers_of(record)
        is_whole = record.ends_round and len(values) == len(numbers) > 1
        if not is_whole or not all(0 < v < _LARGEST for v in values):
            continue
        order = sorted(range(len(values)), key=lambda r: values[r])
        # Neighbours among many places are taken together.
        scale = min(1.0, (_MAX_PLACES - 1) / max(1, len(values) - 1))
        mean = statistics.fmean(values)
        points = [
            (round(scale * rank), values[r] / mean, number)
            for rank, r in enumerate(order)
            if (number := numbers[r]) is not None and math.isfinite(number)
        ]
        if len({math.log(factor) for _, factor, _ in points}) > 1:
            yield record.step, points

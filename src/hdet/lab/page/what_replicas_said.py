"""What the replicas said: whether higher or lower values of a hyperparameter gave lower losses in a round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hdet.records import RoundRecord

_LEAST_ROUNDS = 8
"""Fewer rounds are too few to tell."""
_CLEAR = 2.5
"""Standard errors of a count of coin tosses beyond which a side is clear. Where there is none, one run of 60
rounds in seventy seems to have one."""
_LARGEST = 1e100
_MAX_PLACES = 17
_OfReplicas = Callable[[RoundRecord], Sequence[float | None]]


class Mean(NamedTuple):
    """A mean of ``num`` numbers with its standard error, at a place on an axis."""

    place: float
    mean: float
    error: float
    num: int


class Stretch(NamedTuple):
    """Counts the rounds of a part of the run by the side that did better in them."""

    num_higher: int
    num_lower: int
    num: int
    """Of all rounds, also of those in which no side did better."""

    @property
    def side(self) -> str:
        """``higher`` or ``lower``, whichever did better in clearly more rounds; empty if none did.

        Each round counts once. Losses differ most in the first rounds, whose mean would hide all others.
        """
        lead = self.num_higher - self.num_lower
        if self.num < _LEAST_ROUNDS or abs(lead) <= _CLEAR * math.sqrt(self.num):
            return ""
        return "higher" if lead > 0 else "lower"

    def told(self, name: str) -> str:
        """Name the side in a few words."""
        return f"{self.side} {name} did better" if self.side else f"no clear side of {name}"

    @property
    def counts(self) -> str:
        """Tell in how many rounds the side did better, or the lower one where none is clear."""
        if self.side:
            return f"in {max(self.num_higher, self.num_lower)} of {self.num} rounds"
        return f"lower in {self.num_lower} of {self.num} rounds"


@dataclass(frozen=True)
class Said:
    """Losses of the replicas against their values of one hyperparameter, over the rounds of a run.

    The run is cut in two where the rounds before and those after are most of one mind. If both parts have a
    clear side, both are told. Else it is the side of all rounds.
    """

    name: str
    rounds: list[tuple[int, float]]
    """Step, and loss at the highest value minus loss at the lowest, on the line fitted to the round."""
    width: float
    """Log of the highest value over the lowest."""
    num_before: int
    """Rounds before the side changed; 0 if it did not."""
    places: list[Mean]
    """By value over the mean value: loss minus the mean loss of the round, of the rounds since then."""

    @property
    def stretches(self) -> list[Stretch]:
        """Give the parts of the run that differ, one or two."""
        parts = self.rounds[: self.num_before], self.rounds[self.num_before :]
        return [_counted(part) for part in parts if part]

    @property
    def turn(self) -> int:
        """Give the last step before the side changed; 0 if it did not."""
        return self.rounds[self.num_before - 1][0] if self.num_before else 0

    @property
    def difference(self) -> Mean:
        """Loss at the highest value minus loss at the lowest, over the rounds after :attr:`turn`."""
        return mean_of([difference for _, difference in self.rounds[self.num_before :]])

    @property
    def slope(self) -> tuple[float, float]:
        """Slope of the loss on the log of the value, and its standard error, after :attr:`turn`."""
        return self.difference.mean / self.width, self.difference.error / self.width

    @property
    def can_tell(self) -> bool:
        """Tell whether there are enough rounds for a side to be clear."""
        return len(self.rounds) >= _LEAST_ROUNDS

    @property
    def is_clear(self) -> bool:
        """Tell whether any part of the run has a side."""
        return any(stretch.side for stretch in self.stretches)

    @property
    def verdict(self) -> str:
        """Name the sides in a few words."""
        return self._told(lambda stretch: "")

    @property
    def sentence(self) -> str:
        """Say the verdict, and the counts that it rests on."""
        verdict = self._told(lambda stretch: f" ({stretch.counts})")
        return f"{verdict[0].upper()}{verdict[1:]}."

    def _told(self, counts: Callable[[Stretch], str]) -> str:
        if not self.can_tell:
            return f"too few rounds to tell the better side of {self.name}"
        times = [f" until step {self.turn:,}", " after it"] if self.turn else [""]
        parts = zip(self.stretches, times, strict=True)
        return ", ".join(f"{stretch.told(self.name)}{when}{counts(stretch)}" for stretch, when in parts)


def _counted(rounds: Sequence[tuple[int, float]]) -> Stretch:
    """Count the sides of rounds.

    >>> _counted([(10, -0.5), (20, 0.0), (30, -0.1)])
    Stretch(num_higher=2, num_lower=0, num=3)
    """
    return Stretch(sum(d < 0 for _, d in rounds), sum(d > 0 for _, d in rounds), len(rounds))


def _num_before_turn(rounds: Sequence[tuple[int, float]]) -> int:
    """Count the rounds before the side changed; 0 if it did not.

    >>> _num_before_turn([(step, 9.0) for step in range(8)] + [(step, -0.1) for step in range(8, 40)])
    8
    >>> _num_before_turn([(step, -0.1) for step in range(40)])
    0
    """
    leads = [0]
    for _, difference in rounds:
        leads.append(leads[-1] + (difference < 0) - (difference > 0))
    cut = max(range(len(rounds)), key=lambda k: abs(leads[k]) + abs(leads[-1] - leads[k]))
    return cut if _counted(rounds[:cut]).side and _counted(rounds[cut:]).side else 0


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
            said = Said(name, rounds, statistics.fmean(widths), _num_before_turn(rounds), [])
            since = [record for record in records if record.step > said.turn]
            found.append(replace(said, places=means_by_place(since, name, scores_of)))
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

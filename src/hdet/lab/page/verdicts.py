"""What the records say: which side of a hyperparameter did better, and if smaller weights would help."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hdet.method.loudness import CLEAR, Slope, heard_from, signal_over_noise, slope_of
from hdet.records import RoundRecord
from hdet.round_record import WeightDecayRecord

_LEAST_ROUNDS = 8
"""Fewer rounds are too few to tell."""
_CLEAR = 2.5
"""Standard errors of a count of coin tosses beyond which a side is clear. Where there is none, one run of 60
rounds in seventy seems to have one."""
_LARGEST = 1e100
_LAST_LOOKS = 4
"""Looks at held-out data that tell how it was at the end."""


class Estimate(NamedTuple):
    """A number with its standard error, at a place on an axis."""

    place: float
    value: float
    error: float


@dataclass(frozen=True)
class Said:
    """Counts the rounds of a run by the side of one hyperparameter that did better in them.

    Each round counts once. Losses differ most in the first rounds, whose mean would hide all others.
    """

    name: str
    num_higher: int
    num_lower: int
    num: int
    """Of all rounds, also of those in which no side did better."""
    losses: list[Estimate]
    """By value over the mean value: loss minus the mean loss of the round."""
    ratio: float
    """Signal over noise of a round."""
    sync_every: int
    """T of the rounds."""

    @property
    def side(self) -> str:
        """``higher`` or ``lower``, whichever did better in clearly more rounds; empty if none did."""
        lead = self.num_higher - self.num_lower
        if self.num < _LEAST_ROUNDS or abs(lead) <= _CLEAR * math.sqrt(self.num):
            return ""
        return "higher" if lead > 0 else "lower"

    @property
    def verdict(self) -> str:
        """Name the side in a few words."""
        unclear = "too few rounds to tell" if self.num < _LEAST_ROUNDS else "no clear side"
        return f"{self.side} {self.name}" if self.side else unclear

    @property
    def counts(self) -> str:
        """Tell what the verdict rests on."""
        side, num = ("higher", self.num_higher) if self.side == "higher" else ("lower", self.num_lower)
        return f"{side} {self.name} did better in {num} of {self.num} rounds"

    @property
    def loudness(self) -> str:
        """Tell how loud they were, and from which T a controller could hear them."""
        least = CLEAR / math.sqrt(self.num)
        is_clear = abs(self.ratio) > least
        steps = heard_from(self.sync_every, self.ratio if is_clear else least)
        amount = f"{abs(self.ratio):.2g}" if is_clear else f"below {least:.2g}"
        hears = "hears them from about" if is_clear else "does not hear them before"
        return f"{amount} a round, a controller {hears} T = {float(f'{max(1, steps):.2g}'):,.0f}"


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
    ['higher lr']
    """
    found = []
    for name in explored(records):
        slopes, losses = list[Slope](), dict[int, list[tuple[float, float]]]()
        for points in _rounds(records, name):
            slopes.append(slope_of([math.log(x) for _, x, _ in points], [loss for *_, loss in points]))
            for place, factor, loss in points:
                losses.setdefault(place, []).append((factor, loss))
        if len(slopes) > 1:
            better = sum(slope.value < 0 for slope in slopes), sum(slope.value > 0 for slope in slopes)
            means = [_mean_of(losses[p]) for p in sorted(losses)]
            steps = round(statistics.median(record.num_steps for record in records if record.ends_round))
            found.append(Said(name, *better, len(slopes), means, signal_over_noise(slopes), steps))
    return found


def _mean_of(points: Sequence[tuple[float, float]]) -> Estimate:
    """The mean of numbers at about one place.

    >>> _mean_of([(0.9, 1.0), (0.9, 3.0)])
    Estimate(place=0.9, value=2.0, error=1.0)
    """
    places, numbers = zip(*points, strict=True)
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    return Estimate(statistics.fmean(places), statistics.fmean(numbers), deviation / math.sqrt(len(numbers)))


def _rounds(records: Sequence[RoundRecord], name: str) -> Iterator[list[tuple[int, float, float]]]:
    """Place, value over the mean value and loss minus the mean loss, for rounds that compare replicas."""
    for record in records:
        values, losses = record.values.get(name, []), record.probes or record.losses
        if not record.ends_round or len(values) != len(losses):
            continue
        scored = [
            (place, values[r], loss)
            for place, r in enumerate(sorted(range(len(values)), key=values.__getitem__))
            if r not in record.excluded and 0 < values[r] < _LARGEST
            if (loss := losses[r]) is not None and abs(loss) < _LARGEST
        ]
        if len({math.log(value) for _, value, _ in scored}) > 1:
            middle = statistics.fmean(value for _, value, _ in scored)
            mean = statistics.fmean(loss for *_, loss in scored)
            yield [(place, value / middle, loss - mean) for place, value, loss in scored]


@dataclass(frozen=True)
class Looks:
    """All looks at held-out data by which the weight decay was moved."""

    slopes: list[Estimate]
    """By step: by how much the held-out loss rises per e-fold by which weights shrink."""
    first: float
    """The weight decay at first, ..."""
    last: float
    """... and at the end."""

    @property
    def verdict(self) -> str:
        """Say what held-out data asks for at the end; within two errors that is not clear."""
        ends = self.slopes[-_LAST_LOOKS:]
        slope = statistics.fmean(look.value for look in ends)
        # All looks see the same examples, so that many are not surer than one.
        if abs(slope) <= 2 * math.sqrt(statistics.fmean(look.error**2 for look in ends)):
            return "it is not clear whether smaller weights would help"
        return f"smaller weights would {'still' if slope < 0 else 'not'} help"


def what_held_out_data_said(records: Sequence[RoundRecord]) -> Looks | None:
    """List the looks at held-out data that moved the weight decay; None where there were none.

    >>> looks = [WeightDecayRecord(slope=slope, slope_error=0.1) for slope in (-0.5, -0.4)]
    >>> told = [{"base": {"weight_decay": 0.02}, "controllers": {"weight_decay": look}} for look in looks]
    >>> records = [RoundRecord(round=k, step=k, num_replicas=1, **fields) for k, fields in enumerate(told)]
    >>> what_held_out_data_said(records).verdict
    'smaller weights would still help'
    """
    name = WeightDecayRecord.name
    looks = [(record.step, record.section(WeightDecayRecord)) for record in records]
    seen = [Estimate(step, look.slope, look.slope_error) for step, look in looks if look.slope is not None]
    slopes = [look for look in seen if math.isfinite(look.value + look.error)]
    began = [trace[0] for record in records if (trace := record.base_trace.get(name))]
    bases = [record.base[name] for record in records if name in record.base]
    return Looks(slopes, [*began, *bases][0], bases[-1]) if slopes and bases else None

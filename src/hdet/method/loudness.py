"""How loud replicas speak: the slope of their losses on the log of their values, over its noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import NamedTuple

CLEAR = 2.0
"""A mean this many standard errors from zero is clear."""
_NUM_ALIKE = 10
"""Neighbouring rounds that are taken to have the same noise, while losses and their noise fall over a run."""


class Slope(NamedTuple):
    """What the replicas of one round say."""

    value: float
    """By how much the loss rises per e-fold of the value."""
    error: float
    """Its standard error, by how far the losses are off the line; infinite with two replicas."""


def slope_of(logs: Sequence[float], losses: Sequence[float]) -> Slope:
    """Fit a line to the losses of a round.

    >>> slope_of([-1.0, 0.0, 1.0], [3.0, 2.0, 2.0])
    Slope(value=-0.5, error=0.2886751345948129)
    """
    middle, mean = fmean(logs), fmean(losses)
    places = [log - middle for log in logs]
    width = math.fsum(place * place for place in places)
    value = math.fsum(place * (loss - mean) for place, loss in zip(places, losses, strict=True)) / width
    off = (loss - mean - value * place for place, loss in zip(places, losses, strict=True))
    freedom = len(logs) - 2
    error = math.sqrt(math.fsum(x * x for x in off) / freedom / width) if freedom > 0 else math.inf
    return Slope(value, error)


def signal_over_noise(slopes: Sequence[Slope]) -> float:
    """Pool the slopes of rounds: the signal of one round over its noise.

    Times the root of the number of rounds it is how many standard errors their mean is from zero.

    >>> early, late = [Slope(2.0, 4.0)] * 10, [Slope(0.01, 0.02)] * 30
    >>> signal_over_noise(early + late)
    0.5
    """
    total = 0.0
    for start in range(0, len(slopes), _NUM_ALIKE):
        alike = slopes[start : start + _NUM_ALIKE]
        values = [slope.value for slope in alike]
        noise = fmean(slope.error**2 for slope in alike)
        if math.isinf(noise):  # two replicas: all that is known is how far rounds differ
            noise = variance(values) if len(values) > 1 else math.inf
        noise = max(noise, 1e-12 * fmean(value**2 for value in values))
        total += math.fsum(values) / math.sqrt(noise) if noise else 0.0
    return total / max(1, len(slopes))


def heard_from(sync_every: int, ratio: float, momentum: float = 0.9) -> float:
    """Predict the T from which a controller hears the replicas: a mean over its memory is then clear.

    A memory of beta is one of (1 + beta) / (1 - beta) rounds. The noise of a round falls with the root of T.
    The slope mostly grows with T too, so that this is an upper bound.

    Args:
        sync_every: T of the rounds that were seen.
        ratio: their signal over noise.
        momentum: beta of the controller.

    >>> round(heard_from(5, 0.1)), heard_from(1000, 0.0)
    (105, inf)
    """
    least = CLEAR / math.sqrt((1 + momentum) / (1 - momentum))
    return sync_every * (least / ratio) ** 2 if ratio else math.inf

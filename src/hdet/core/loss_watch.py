"""LossWatch: notice that a run spoils its weights, by its training loss."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["LossWatch", "watch_loss"]


class LossWatch(NamedTuple):
    """What is remembered of the training loss from one control time to the next."""

    first: float = math.nan
    level: float = math.nan
    """Running mean."""
    lowest: float = math.inf
    """Of the running mean."""
    last: float = math.inf
    """At the last control time at which it was not up."""
    peak: float = -math.inf
    """The highest since it jumped up; lower than any where it is not up."""
    variance: float = 0.0
    """Of the mean loss between two control times, by the differences of neighbours."""
    num_differences: int = 0


def watch_loss(watch: LossWatch, loss: float) -> tuple[LossWatch, bool]:
    """One control time: the new memory, and whether the weights are being spoilt.

    They are if the loss is above its lowest level by a tenth of all that the run has gained, and by five
    standard deviations, and has not been as high since it left that. Where less was gained, none can say.

    Args:
        watch: what was remembered.
        loss: mean over the steps since the last control time.

    >>> watch = LossWatch()
    >>> for loss in (5.0, 4.0, 3.0, 2.9, 2.8, 2.8, 2.7, 2.8, 2.7, 2.6, 2.7, 2.6, 2.7, 2.6, 2.6, 2.6, 2.6):
    ...     watch, is_spoilt = watch_loss(watch, loss)
    >>> is_spoilt, watch_loss(watch, 2.7)[1], watch_loss(watch, 3.6)[1]
    (False, False, True)
    """
    if math.isnan(watch.first):
        return LossWatch(loss, loss, loss, loss), False
    first, level, lowest, last, peak, variance, count = watch
    noise = math.sqrt(variance / (1 - 0.9**count)) if count else math.inf
    gain, room = first - lowest, max(0.1 * (first - lowest), 5 * noise)
    if gain > room and loss > lowest + room:
        return watch._replace(peak=max(peak, loss)), loss > peak
    level = 0.7 * level + 0.3 * loss
    variance = 0.9 * variance + 0.1 * (loss - last) ** 2 / 2
    return LossWatch(first, level, min(lowest, level), loss, -math.inf, variance, count + 1), False

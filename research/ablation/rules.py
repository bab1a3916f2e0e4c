"""What a crash and a spike are, and which learning rates they make Low and High: by rule, not by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from hdet.lab.ablation import LOW_FACTOR
from hdet.lab.stability import (
    LOST,
    NOISE,
    SPIKE,
    UNRECOVERED,
    WINDOW,
    Stability,
    is_lost,
    judge,
    window_means,
)

__all__ = [
    "RULES",
    "Stability",
    "choose_high",
    "choose_safe",
    "is_lost",
    "judge",
    "lattice_lr",
    "next_points",
    "point_of",
    "window_means",
]

_PER_DECADE = 4
_HALF_WIDTH = 4  # a decade to each side
_MOST = 10  # how far the grid widens to each side: two and a half decades

RULES = (
    f"A spike: a {WINDOW}-step mean of the training loss, after warmup, above the lowest earlier one "
    f"by more than {100 * SPIKE:g} % of it and {100 * NOISE:g} % of the first step's loss (from a "
    "checkpoint, of the untrained model's). A crash: a loss that is not finite, a final held-out loss above "
    "the untrained model's, a spike that is "
    f"not recovered from (the last mean above the lowest by more than {100 * UNRECOVERED:g} % and "
    f"those {100 * NOISE:g} %), or, at an LR above the best plain one, less than {100 * LOST:g} % of "
    "the best plain LR's gain over the untrained model (a network that died without a spike; "
    "ablation.jsonl does not count this one, as it takes the whole grid to tell). High: the smallest "
    "LR of the grid (plain runs, 4 per factor of ten) at which most seeds crash. Low: the largest LR "
    f"up to which no plain run has a spike or a crash, over {LOW_FACTOR}."
)


_Place = TypeVar("_Place", int, float)
"""A learning rate, or its point of the grid."""


def choose_high(crashes: Mapping[_Place, Sequence[bool]]) -> _Place | None:
    """The smallest learning rate at which more than half of the seeds crash; None if there is none.

    >>> choose_high({0.1: [False, False, True], 1.0: [True, False, True], 10.0: [True, True, True]})
    1.0
    """
    return min((lr for lr, seeds in crashes.items() if 2 * sum(seeds) > len(seeds)), default=None)


def choose_safe(spikes: Mapping[float, Sequence[bool]]) -> float | None:
    """The largest learning rate up to which no seed has a spike; None if the smallest has one.

    >>> choose_safe({0.1: [False, False], 1.0: [False, True], 10.0: [False, False]})
    0.1
    """
    safe = None
    for lr in sorted(spikes):
        if any(spikes[lr]):
            break
        safe = lr
    return safe


def lattice_lr(point: int) -> float:
    """The learning rate of a point of the grid, to four digits.

    >>> lattice_lr(-10)
    0.003162
    """
    return float(f"{10 ** (point / _PER_DECADE):.4g}")


def point_of(lr: float) -> int:
    """The point of the grid that a learning rate is of.

    >>> point_of(0.003162)
    -10
    """
    return round(math.log10(lr) * _PER_DECADE)


def next_points(
    losses: Mapping[int, float],
    crashes: Mapping[int, Sequence[bool]],
    spikes: Mapping[int, Sequence[bool]],
    middle_lr: float,
) -> list[int]:
    """Points of the grid that are to be run next; none when Low, High and the best can be told.

    A decade to each side of the middle first; then upwards until most seeds crash, and downwards until no
    seed has a spike and the best is no longer at the lower edge.

    Args:
        losses: mean final loss by point.
        crashes: whether each seed crashed, by point.
        spikes: whether each seed had a spike, by point.
        middle_lr: of the first grid.

    >>> next_points({}, {}, {}, 1.0)
    [-4, -3, -2, -1, 0, 1, 2, 3, 4]
    >>> done = range(-4, 5)
    >>> next_points({p: 2.0 + p for p in done}, {p: [p > 2] for p in done}, {p: [p > 1] for p in done}, 1.0)
    [-6, -5]
    """
    middle = point_of(middle_lr)
    missing = [p for p in range(middle - _HALF_WIDTH, middle + _HALF_WIDTH + 1) if p not in losses]
    if missing:
        return missing
    low, high = min(losses), max(losses)
    wanted = []
    if any(spikes[low]) or losses[low] == min(losses.values()):
        wanted += [low - 2, low - 1]
    if choose_high(crashes) is None:
        wanted += [high + 1, high + 2]
    return [point for point in wanted if abs(point - middle) <= _MOST]

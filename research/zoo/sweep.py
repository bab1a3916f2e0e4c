"""The strict baseline: plain training at the best of many learning rates and two warm-ups, with the tail."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["PER_DECADE", "WARMUPS", "Point", "best_point", "lr_at", "next_points"]

PER_DECADE = 8
"""Learning rates to a factor of ten, so that neighbours differ by a factor of 1.33."""
WARMUPS = (0.1, 0.4)
_COARSE, _MIDDLE = 4, 2
"""Lattice points from one to the next, at first and around the best of those."""
_HALF_WIDTH = 16
"""Two decades to each side."""
_MOST = 40
"""Five decades: how far the range widens while the best is at its edge."""

Point = tuple[float, int]
"""Warm-up, and place of the learning rate on the lattice."""


def lr_at(place: int) -> float:
    """The learning rate of a place, to four digits.

    >>> lr_at(0), lr_at(-4)
    (1.0, 0.3162)
    """
    return float(f"{10 ** (place / PER_DECADE):.4g}")


def best_point(losses: Mapping[Point, float]) -> Point:
    """The point of the lowest loss."""
    return min(losses, key=lambda point: losses[point])


def next_points(losses: Mapping[Point, float], middle_lr: float) -> list[Point]:
    """What is to be run next, given the losses of what was; nothing when it is done.

    First two learning rates per factor of ten over four decades, with the short warm-up; further ones while
    the best is at an edge. Then, with each warm-up, four per factor of ten around the best; at last the
    neighbours of the best of these, and so on until both neighbours of the best are known.

    >>> [lr_at(place) for _, place in next_points({}, 3e-3)]
    [3.162e-05, 0.0001, 0.0003162, 0.001, 0.003162, 0.01, 0.03162, 0.1, 0.3162]
    """
    short = WARMUPS[0]
    middle = _COARSE * round(math.log10(middle_lr) * PER_DECADE / _COARSE)
    places = range(middle - _HALF_WIDTH, middle + _HALF_WIDTH + 1, _COARSE)
    if missing := [(short, place) for place in places if (short, place) not in losses]:
        return missing
    coarse = {place: loss for (w, place), loss in losses.items() if w == short and place % _COARSE == 0}
    best = min(coarse, key=lambda place: coarse[place])
    if not math.isfinite(coarse[best]) or best == min(coarse):
        wider = min(coarse) - _COARSE
    else:
        wider = best + _COARSE if best == max(coarse) else None
    if wider is not None and abs(wider - middle) <= _MOST:
        return [(short, wider)]
    if not math.isfinite(coarse[best]):
        return []
    around = [best + k * _MIDDLE for k in (-2, -1, 0, 1, 2)]
    if missing := [(w, place) for w in WARMUPS for place in around if (w, place) not in losses]:
        return missing
    wanted = []
    for warmup in WARMUPS:
        here = {place: loss for (w, place), loss in losses.items() if w == warmup}
        place = min(here, key=lambda place: here[place])
        wanted += [(warmup, near) for near in (place - 1, place + 1) if near not in here]
    return wanted

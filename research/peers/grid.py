"""The sweep that everything is measured by: plain runs over a grid of learning rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from research.peers.base import Diverged, Job, Method, Trained
from research.peers.plain import plain_run

__all__ = ["METHODS", "lr_at", "next_points"]

_PER_DECADE = 4
_COARSE = 2  # lattice points from one coarse point to the next: two per decade
_HALF_WIDTH = 8  # two decades to each side
_MOST = 20  # five decades: how far the grid widens while the best is at its edge


def lr_at(point: int) -> float:
    """The learning rate of a lattice point, four to a decade, to four digits.

    >>> lr_at(0), lr_at(-10)
    (1.0, 0.003162)
    """
    return float(f"{10 ** (point / _PER_DECADE):.4g}")


def next_points(losses: Mapping[int, float], middle_lr: float) -> list[int]:
    """Lattice points that are to be run next, given the losses of those that were; none when it is done.

    First two points per factor of ten over four decades around the middle; then further ones while the best
    is at an edge; then the best point's neighbours at four per factor of ten.

    >>> [lr_at(p) for p in next_points({}, 3e-3)]
    [3.162e-05, 0.0001, 0.0003162, 0.001, 0.003162, 0.01, 0.03162, 0.1, 0.3162]
    """
    middle = _COARSE * round(math.log10(middle_lr) * _PER_DECADE / _COARSE)
    coarse = range(middle - _HALF_WIDTH, middle + _HALF_WIDTH + 1, _COARSE)
    missing = [point for point in coarse if point not in losses]
    if missing:
        return missing
    best = min(losses, key=lambda point: losses[point])
    low, high = min(losses), max(losses)
    if not math.isfinite(losses[best]) or best == low:
        wider = low - _COARSE
    else:
        wider = high + _COARSE if best == high else None
    if wider is not None and abs(wider - middle) <= _MOST:
        return [wider]
    if not math.isfinite(losses[best]):
        return []
    return [point for point in (best - 1, best + 1) if point not in losses]


def _run(job: Job) -> Trained:
    results: dict[int, Trained] = {}

    def losses() -> dict[int, float]:
        found = {point: trained.metrics.get("loss", math.inf) for point, trained in results.items()}
        return {point: loss if math.isfinite(loss) else math.inf for point, loss in found.items()}

    while points := next_points(losses(), job.task.learning_rate):
        for point in points:
            with suppress(Diverged):
                results[point] = Trained({})
                results[point] = plain_run(replace(job, start_lr=lr_at(point)))
    best = min(results, key=losses().__getitem__)
    return Trained(results[best].metrics, lr_at(best))


METHODS = (
    Method(
        name="best_of_sweep",
        description="plain_linear at every LR of a grid of four decades, refined to four per factor of ten "
        "at the best; the baseline",
        run=_run,
        cost=2 * _HALF_WIDTH // _COARSE + 3,
        uses_start=False,
    ),
)

"""The baseline: the best of many learning rates and weight decays, run again on fresh seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hdet.method.recipe import Recipe
from research.compare.ledger import Record
from research.explore.problem import Problem
from research.recipe.problems import PROBLEMS
from research.thermostat.experiment import best_of
from research.zoo.experiment import AGAIN, SWEEP, loss_of

__all__ = [
    "SELECTING",
    "SHORT",
    "Best",
    "Place",
    "Point",
    "baseline",
    "finalists",
    "lr_and_decay",
    "next_places",
    "swept",
    "winner",
]

SHORT = 0.1
"""The other warm-up, which the best of the sweep is run with, too."""
_RATE, _STRENGTH = 3.0, 10.0
"""Steps of the grid: of the learning rate, over the problem's guess; of learning rate x weight decay x steps,
which says how often weights decay by e. A place counts half steps."""
_RATES, _STRENGTHS = range(-4, 7, 2), range(0, 5, 2)
_LOWEST = 0.3
"""The strength of place 0."""
_MOST = 6
"""Half steps that the sweep goes on beyond its grid while the best is at an edge."""

SELECTING = (1, 2)
"""Seeds, beside 0, that tell which finalist of a sweep wins."""
_NUM_FINALISTS = 3

Place = tuple[int, int]
Point = tuple[float, float, float]
"""Learning rate, weight decay and warm-up."""


def lr_and_decay(problem: Problem, place: Place) -> tuple[float, float]:
    """Give the learning rate and the weight decay of a place.

    >>> problem = PROBLEMS["vowel_mlp"]
    >>> lr_and_decay(problem, (0, 0)), lr_and_decay(problem, (2, 1))
    ((0.001, 0.3), (0.003, 0.3162))
    """
    lr = float(f"{problem.guess * _RATE ** (place[0] / 2):.4g}")
    return lr, problem.decay_at(_LOWEST * _STRENGTH ** (place[1] / 2), lr)


def next_places(losses: Mapping[Place, float]) -> list[Place]:
    """Give what is to be run next, from the losses of what was; nothing when the sweep is done.

    >>> len(next_places({}))
    18
    >>> losses = {place: abs(place[0] - 9) + abs(place[1] - 2.0) for place in next_places({})}
    >>> while places := next_places(losses):
    ...     print(places)
    ...     losses |= {place: abs(place[0] - 9) + abs(place[1] - 2.0) for place in places}
    [(8, 2)]
    [(10, 2), (8, 0), (8, 4)]
    [(7, 2), (9, 2), (8, 1), (8, 3)]
    """
    if missing := [(r, s) for r in _RATES for s in _STRENGTHS if (r, s) not in losses]:
        return missing
    coarse = {place: loss for place, loss in losses.items() if not (place[0] % 2 or place[1] % 2)}
    rate, strength = best = min(coarse, key=coarse.__getitem__)
    around = [(rate - 2, strength), (rate + 2, strength), (rate, strength - 2), (rate, strength + 2)]
    if wider := [place for place in around if place not in losses and _is_near(place)]:
        return wider
    if not math.isfinite(losses[best]):
        return []
    fine = [(rate - 1, strength), (rate + 1, strength), (rate, strength - 1), (rate, strength + 1)]
    return [place for place in fine if place not in losses]


def _is_near(place: Place) -> bool:
    return all(
        grid[0] - _MOST <= k <= grid[-1] + _MOST for k, grid in zip(place, (_RATES, _STRENGTHS), strict=True)
    )


def swept(records: Sequence[Record], name: str) -> dict[Place, float]:
    """Give the losses of the places of a sweep."""
    problem, losses = PROBLEMS[name], dict[Place, float]()
    for r in _sweep(records, name):
        if (r["warmup"], r["seed"]) == (Recipe.warmup, 0):
            rate = round(2 * math.log(r["lr"] / problem.guess, _RATE))
            strength = r["decay"] * r["lr"] * problem.num_steps * problem.decays_per_step
            losses[rate, round(2 * math.log(strength / _LOWEST, _STRENGTH))] = loss_of(r)
    return losses


@dataclass(frozen=True)
class Best:
    """What a sweep has found, on fresh seeds."""

    lr: float
    decay: float | None
    loss: float
    error: float
    """Standard error of the mean loss, relative to it; NaN of one run."""
    accuracy: float | None


def finalists(records: Sequence[Record], name: str) -> list[Point]:
    """Give the best place of each of the three best learning rates of a sweep, best first.

    Where a learning rate is almost too high one seed says little, and the lowest loss may be luck.
    """
    best: dict[float, Record] = {}
    for r in sorted((r for r in _sweep(records, name) if r["seed"] == 0), key=loss_of):
        best.setdefault(r["lr"], r)
    return [_point(r) for r in list(best.values())[:_NUM_FINALISTS]]


def winner(records: Sequence[Record], name: str) -> Point:
    """Give the finalist with the lowest mean loss over its seeds."""
    losses = {point: list[float]() for point in finalists(records, name)}
    for r in _sweep(records, name):
        if _point(r) in losses:
            losses[_point(r)].append(loss_of(r))
    return min(losses, key=lambda point: statistics.fmean(losses[point]))


def _sweep(records: Sequence[Record], name: str) -> list[Record]:
    return [r for r in records if (r["problem"], r["method"]) == (name, SWEEP)]


def _point(record: Record) -> Point:
    return record["lr"], record["decay"], record["warmup"]


def baseline(records: Sequence[Record], name: str) -> Best | None:
    """Give the baseline of a problem; None where the sweep or its winner's fresh runs are missing."""
    if name not in PROBLEMS:
        found = best_of(name)
        return Best(found.lr, None, found.loss, found.error, None)
    again = [r for r in records if (r["problem"], r["method"]) == (name, AGAIN)]
    again = again and [r for r in again if _point(r) == winner(records, name)]
    if not again:
        return None
    losses = [loss_of(r) for r in again]
    accuracies = [r["metrics"]["accuracy"] for r in again if "accuracy" in r["metrics"]]
    loss = statistics.fmean(losses)
    error = math.nan
    if len(losses) > 1 and math.isfinite(loss):
        error = statistics.stdev(losses) / len(losses) ** 0.5 / loss
    accuracy = statistics.fmean(accuracies) if accuracies else None
    return Best(again[0]["lr"], again[0]["decay"], loss, error, accuracy)

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

__all__ = ["SHORT", "Best", "Place", "baseline", "lr_and_decay", "next_places", "swept", "winner"]

SHORT = 0.1
"""The other warm-up, which the best of the sweep is run with once."""
_RATE, _STRENGTH = 3.0, 10.0
"""Steps of the grid: of the learning rate, over the problem's guess; of learning rate x weight decay x steps,
which says how often weights decay by e. A place counts half steps."""
_RATES, _STRENGTHS = range(-4, 7, 2), range(0, 5, 2)
_LOWEST = 0.3
"""The strength of place 0."""
_MOST = 6
"""Half steps that the sweep goes on beyond its grid while the best is at an edge."""

Place = tuple[int, int]


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
    for r in records:
        if (r["problem"], r["method"], r["warmup"]) == (name, SWEEP, Recipe.warmup):
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


def winner(records: Sequence[Record], name: str) -> Record:
    """Give the run of the sweep with the lowest loss, whichever warm-up it has."""
    return min((r for r in records if (r["problem"], r["method"]) == (name, SWEEP)), key=loss_of)


def baseline(records: Sequence[Record], name: str) -> Best | None:
    """Give the baseline of a problem; None where the sweep or its winner's fresh runs are missing."""
    if name not in PROBLEMS:
        found = best_of(name)
        return Best(found.lr, None, found.loss, found.error, None)
    again = [r for r in records if (r["problem"], r["method"]) == (name, AGAIN)]
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

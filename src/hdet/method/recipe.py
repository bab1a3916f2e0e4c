"""Recipe: the shape of the schedule, its tail, and the constants that were measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hdet.checks import require_choice, require_count, require_number

Anneal = Literal["linear", "cosine", "none"]


def one_cycle(
    step: int,
    total_steps: int,
    *,
    warmup: float = 0.1,
    start: float = 1 / 25,
    end: float = 0.0,
    anneal: Anneal = "linear",
) -> float:
    """Factor on the peak for this step: a linear rise from ``start`` to one, then an anneal to ``end``.

    Args:
        step: from 0 to ``total_steps - 1``; later steps stay at ``end``.
        total_steps: length of the schedule.
        warmup: share of the steps in which the factor rises.
        start: factor of the first step.
        end: factor after the last step.
        anneal: ``"linear"``, ``"cosine"``, or ``"none"`` to stay at one.

    >>> [round(one_cycle(t, 10, warmup=0.2, start=0.5), 3) for t in (0, 1, 2, 6, 9, 10)]
    [0.5, 0.75, 1.0, 0.5, 0.125, 0.0]
    """
    rise = round(warmup * total_steps)
    if step < rise:
        return start + (1 - start) * step / rise
    if anneal == "none":
        return 1.0
    share = min(1.0, (step - rise) / max(1, total_steps - rise))
    if anneal == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return 1 - (1 - end) * share


_NUM_SAMPLES = 64
"""Steps of a long tail that are at least averaged: neighbours tell much the same, and each has a price."""


def tail_steps(total_steps: int, share: float) -> range:
    """The steps after which the weights are taken into the mean; the last one is among them.

    Args:
        total_steps: length of the run.
        share: of the run, how much of its end, rounded to at least one step; 0 for no tail.

    >>> list(tail_steps(100, 0.05))
    [96, 97, 98, 99, 100]
    >>> steps = tail_steps(10_000, 0.075)
    >>> steps[0], steps[-1], len(steps)
    (9263, 10000, 68)
    """
    require_count("total_steps", total_steps)
    if require_number("share", share, at_least=0, at_most=1) == 0:
        return range(0)
    length = max(1, round(share * total_steps))
    interval = max(1, length // _NUM_SAMPLES)
    return range(total_steps - (length // interval - 1) * interval, total_steps + 1, interval)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The schedule of :class:`hdet.AutoLR`, as settings. The defaults are what was measured.

    >>> recipe = Recipe(total_steps=1000)
    >>> recipe.average_tail, recipe.shape(400), recipe.steps_per_round
    (0.075, 1.0, 16)
    """

    total_steps: int
    """Length of training, S."""
    warmup: float = 0.4
    """Share of the steps in which the learning rate rises. On nine dev problems of the zoo, each at its best
    learning rate, 40 % ends at 1.000 to 1.037 of the best warm-up, 10 % at 1.000 to 1.082."""
    anneal: Anneal = "linear"
    """The form of its fall afterwards."""
    anneal_to: float = 0.15
    """Share of the peak at which the anneal ends. The tail does the rest."""
    average_tail: float = 0.075
    """Share of the steps, the last ones, whose weights are averaged into the final ones."""
    sync_every: int | None = None
    """Steps per round, T; None for 60 rounds in a short run, so that the guard looks often, for rounds of 25
    steps in a longer one, and for 400 rounds in a long one."""

    def __post_init__(self) -> None:
        require_count("total_steps", self.total_steps)
        require_number("warmup", self.warmup, at_least=0, below=1)
        require_choice("anneal", self.anneal, ("linear", "cosine", "none"))
        require_number("anneal_to", self.anneal_to, at_least=0, at_most=1)
        require_number("average_tail", self.average_tail, at_least=0, below=1)
        if self.sync_every is not None:
            require_count("sync_every", self.sync_every)

    def shape(self, step: int) -> float:
        """The planned learning rate of a step, over its peak."""
        return one_cycle(step, self.total_steps, warmup=self.warmup, anneal=self.anneal, end=self.anneal_to)

    @property
    def steps_per_round(self) -> int:
        """T."""
        short = min(25, max(5, self.total_steps // 60))
        return self.sync_every or max(short, self.total_steps // 400)

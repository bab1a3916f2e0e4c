"""Recipe: what is recommended, with the constants that were measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hdet.core.anchored import AnchoredController
from hdet.core.checks import require_choice, require_count, require_number
from hdet.core.scout import Scout, least_steps
from hdet.core.shape import Anneal, one_cycle

__all__ = ["Recipe"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What :class:`hdet.AutoLR` does, as settings. The defaults are what was measured.

    >>> recipe = Recipe(total_steps=1000)
    >>> recipe.average_tail, recipe.shape(100), recipe.steps_per_round
    (0.075, 1.0, 25)
    """

    total_steps: int
    """Length of training, S."""
    steps_per_epoch: float | None = None
    """Optimizer steps of one pass over the training data; ``math.inf`` if it never repeats, None if you do
    not know. Where data repeats, the scout asks for less and the controller stops after the first pass."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises."""
    anneal: Anneal = "linear"
    """How it falls afterwards."""
    anneal_to: float = 0.15
    """Share of the peak at which the anneal ends. The tail does the rest."""
    average_tail: float = 0.075
    """Share of the steps, the last ones, whose weights are averaged into the final ones."""
    sync_every: int | None = None
    """Steps per round, T; None for 25, or for 400 rounds in a long run."""
    scout: bool | None = None
    """Whether short trials find the learning rate first; None if the run is long enough for them."""
    scout_fraction: float = 0.03
    """Share of the steps that the scout takes."""

    def __post_init__(self) -> None:
        require_count("total_steps", self.total_steps)
        if self.steps_per_epoch not in (None, math.inf):
            remedy = "math.inf says that data never repeats, None that you do not know"
            require_count("steps_per_epoch", self.steps_per_epoch, remedy=remedy)
        require_number("warmup", self.warmup, at_least=0, below=1)
        require_choice("anneal", self.anneal, ("linear", "cosine", "none"))
        require_number("anneal_to", self.anneal_to, at_least=0, at_most=1)
        require_number("average_tail", self.average_tail, at_least=0, below=1)
        if self.sync_every is not None:
            require_count("sync_every", self.sync_every)
        require_number("scout_fraction", self.scout_fraction, above=0, below=0.5)

    def shape(self, step: int) -> float:
        """The planned learning rate of a step, over its peak."""
        return one_cycle(step, self.total_steps, warmup=self.warmup, anneal=self.anneal, end=self.anneal_to)

    @property
    def steps_per_round(self) -> int:
        """T."""
        return self.sync_every or max(25, self.total_steps // 400)

    def scout_for(self, num_replicas: int) -> Scout | None:
        """The settings of the scout; None where there is none."""
        repeats = self.steps_per_epoch is not None and self.total_steps > self.steps_per_epoch
        scout = Scout(fraction=self.scout_fraction, data_repeats=repeats)
        is_long_enough = self.total_steps >= least_steps(scout, num_replicas)
        return scout if (is_long_enough if self.scout is None else self.scout) else None

    @property
    def controller(self) -> AnchoredController:
        """The settings of the controller."""
        return AnchoredController(repeats_after=self.steps_per_epoch)

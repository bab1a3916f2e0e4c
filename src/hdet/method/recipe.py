"""Recipe: what is recommended, with the constants that were measured."""

from __future__ import annotations

from dataclasses import dataclass

from hdet.checks import require_choice, require_count, require_number
from hdet.method.shape import Anneal, one_cycle


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
    """How it falls afterwards."""
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

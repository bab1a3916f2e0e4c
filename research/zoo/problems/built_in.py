"""The tasks that hdet was built on, with more held-out data than their own."""

from __future__ import annotations

from dataclasses import dataclass

from hdet.lab.tasks.charlm import CharLM
from hdet.lab.tasks.feed import Feed
from hdet.lab.tasks.feed_world import Events
from research.zoo.problem import Problem

__all__ = ["CharsGpt", "FeedRanker"]


@dataclass(frozen=True, kw_only=True)
class CharsGpt(CharLM, Problem):
    """Characters of Python's standard library, a transformer of 22 000 parameters."""

    num_evaluation_batches: int = 32

    family = "transformer language model"
    split = "dev"


@dataclass(frozen=True, kw_only=True)
class FeedRanker(Feed, Problem):
    """What users of a feed do with its items."""

    steps_per_year: int = 500

    family = "recommender"
    split = "dev"
    num_steps = 500

    def evaluation_batches(self) -> list[Events]:
        """Of the last tenth of the year."""
        return [self._held_out("evaluation", i) for i in range(24)]

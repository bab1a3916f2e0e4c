"""All problems by name."""

from __future__ import annotations

import importlib
import re
from functools import lru_cache

from hdet.checks import require_choice
from research.zoo.problem import Problem, Split

__all__ = ["names", "problem_of"]

_FILES = (
    "built_in", "text", "images", "tables", "series", "physics", "finetuning", "extra", "sparse",
    "points", "graphs", "densities", "signals", "masked", "games", "contrast",
)  # fmt: skip


@lru_cache(maxsize=1)
def _kinds() -> dict[str, type[Problem]]:
    modules = [importlib.import_module(f"research.zoo.problems.{file}") for file in _FILES]
    kinds = [
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Problem) and kind.__module__ == module.__name__
    ]
    return {
        re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower(): kind
        for kind in kinds
        if not kind.__name__.startswith("_")
    }


def names(split: Split | None = None) -> list[str]:
    """The problems of a split, or all of them."""
    return [name for name, kind in _kinds().items() if split in (None, kind.split)]


@lru_cache(maxsize=8)
def problem_of(name: str) -> Problem:
    """The problem of this name, made once per process."""
    return _kinds()[require_choice("problem", name, tuple(_kinds()))]()

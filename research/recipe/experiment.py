"""Run the study: the sweeps, their winners on fresh seeds, and the recipe from starts that are off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from hdet.checks import require_choice
from hdet.errors import HdetError
from hdet.method.recipe import Recipe
from research.compare.ledger import Ledger, Record, finishing
from research.recipe.arms import ARMS
from research.recipe.problems import PROBLEMS, names
from research.recipe.sweep import (
    SELECTING,
    SHORT,
    Point,
    baseline,
    finalists,
    lr_and_decay,
    next_places,
    swept,
    winner,
)
from research.recipe.task import task_of
from research.zoo.experiment import AGAIN, FRESH, SWEEP, outcome_of, plain_with_tail
from research.zoo.problem import Split

__all__ = ["FAR", "NEAR", "open_ledger", "run_study", "train"]

_KEY = ("problem", "method", "start", "lr", "decay", "warmup", "seed")
NEAR = {"x0.1": 0.1, "x1": 1.0, "x10": 10.0}
"""Learning rates that a run begins from, over the best of the sweep ..."""
FAR = {"1e-5": 1e-5, "1e-1": 1e-1}
"""... and as they are."""


def open_ledger(folder: str | Path) -> Ledger:
    """The runs of a folder."""
    return Ledger(Path(folder), "recipe.jsonl", _KEY, result="metrics")


def run_study(
    folder: str | Path,
    *,
    split: Split | None = "dev",
    problems: Sequence[str] = (),
    arms: Sequence[str] = (),
    num_seeds: int = 2,
    num_jobs: int = 1,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Run what the folder does not have yet; whether all is there in the end.

    Args:
        folder: of ``recipe.jsonl``.
        split: problems of this split only.
        problems: these only.
        arms: names from :data:`research.recipe.arms.ARMS`; the baseline is always run.
        num_seeds: of the arms.
        num_jobs: runs at a time; 0 for one per core.
        on_done: called with the number of runs done, and that of all as far as it is known.
        should_stop: asked now and then.
    """
    wanted = [require_choice("problems", name, tuple(names())) for name in problems] or names(split)
    for arm in arms:
        ARMS[require_choice("arms", arm, tuple(ARMS))].require()
    ledger = open_ledger(folder)
    with finishing(ledger, train, num_jobs, on_done, should_stop) as finish:
        for name in wanted:
            while specs := _next_of_baseline(name, ledger):
                if not finish(specs):
                    return False
            if not finish(_specs_of_arms(name, ledger.records, arms, range(num_seeds))):
                return False
    return True


def _spec(
    name: str, method: str, seed: int, *, lr: float, decay: float | None, start: str = "", warmup: float
) -> Record:
    lr, decay = float(f"{lr:.4g}"), None if decay is None else float(f"{decay:.4g}")
    return dict(zip(_KEY, (name, method, start, lr, decay, warmup, seed), strict=True))


def _next_of_baseline(name: str, ledger: Ledger) -> list[Record]:
    """Give what is missing of a sweep, then of the other warm-up, of the finalists, and of the winner."""
    if name not in PROBLEMS:
        return []

    def missing(method: str, points: Sequence[Point], seeds: Sequence[int]) -> list[Record]:
        specs = [
            _spec(name, method, seed, lr=lr, decay=decay, warmup=warmup)
            for lr, decay, warmup in points
            for seed in seeds
        ]
        return [spec for spec in specs if spec not in ledger]

    problem, records = PROBLEMS[name], ledger.records
    places = next_places(losses := swept(records, name))
    if places:
        return missing(SWEEP, [(*lr_and_decay(problem, place), Recipe.warmup) for place in places], [0])
    best = min(losses, key=losses.__getitem__)
    if losses[best] == math.inf:
        raise HdetError(f"the sweep of {name!r} must train at one place at least: check the problem")
    return (
        missing(SWEEP, [(*lr_and_decay(problem, best), SHORT)], [0])
        or missing(SWEEP, finalists(records, name), SELECTING)
        or missing(AGAIN, [winner(records, name)], FRESH)
    )


def _specs_of_arms(
    name: str, records: Sequence[Record], arms: Sequence[str], seeds: Sequence[int]
) -> list[Record]:
    best = baseline(records, name)
    assert best is not None, name
    starts = {start: best.lr * factor for start, factor in NEAR.items()} | FAR
    return [
        _spec(name, arm, seed, lr=lr, decay=None, start=start, warmup=Recipe.warmup)
        for arm in arms
        for start, lr in (starts if ARMS[arm].uses_start else {"": best.lr}).items()
        for seed in seeds
    ]


def train(spec: Record) -> Record:
    """Run one, and add its results."""
    is_baseline = spec["method"] in (SWEEP, AGAIN)
    run = plain_with_tail(spec["warmup"]) if is_baseline else ARMS[spec["method"]].run
    return spec | outcome_of(task_of(spec["problem"], spec["decay"]), run, lr=spec["lr"], seed=spec["seed"])

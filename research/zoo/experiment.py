"""Run the zoo: the strict baseline of every problem, then every method from starts that are off."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.optim import SGD

from hdet.checks import require_choice
from hdet.method.fan_out import derived_seed
from hdet.method.recipe import Recipe
from research.compare.ledger import Ledger, Record, finishing
from research.peers import METHODS
from research.peers.base import Diverged, Job, Trained
from research.peers.plain import plain_run
from research.zoo.catalogue import names, problem_of
from research.zoo.problem import Problem, Split
from research.zoo.sweep import Point, best_point, lr_at, next_points

__all__ = [
    "AGAIN",
    "FRESH",
    "STARTS",
    "SWEEP",
    "open_ledger",
    "outcome_of",
    "plain_with_tail",
    "relative_error",
    "run_zoo",
    "sweep_losses",
]

SWEEP, AGAIN = "sweep", "best again"
"""The runs that choose the best learning rate and warm-up, and runs of that choice on fresh seeds: the lowest
of 25 means of two seeds is low by luck, too."""
FRESH = (10, 11, 12, 13)
"""Seeds of the strict baseline. Problems whose error is small need only the first two."""
_LARGEST_ERROR = 0.02
STARTS = (0.01, 0.1, 1.0, 10.0, 100.0)
_KEY = ("problem", "method", "warmup", "start", "lr", "seed")


def open_ledger(folder: str | Path) -> Ledger:
    """The runs of a folder."""
    return Ledger(Path(folder), "zoo.jsonl", _KEY, result="metrics")


def run_zoo(
    *,
    methods: Sequence[str],
    split: Split | None = None,
    problems: Sequence[str] = (),
    starts: Sequence[float] = STARTS,
    seeds: Sequence[int] = (0, 1, 2),
    folder: str | Path,
    num_jobs: int = 0,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Run what the folder does not have yet; whether all is there in the end.

    Args:
        methods: names from :data:`research.peers.METHODS`; the sweep and its winner again are always run.
        split: problems of this split only.
        problems: these only.
        starts: starting learning rates as factors on the best one of the sweep.
        seeds: of the sweep. Methods have twice as many where a problem is noisy.
        folder: of ``zoo.jsonl``.
        num_jobs: runs at a time; 0 for one per core.
        on_done: called with the number of runs done, and that of all as far as it is known.
        should_stop: asked now and then.
    """
    wanted = [name for name in names(split) if not problems or name in problems]
    for method in methods:
        require_choice("methods", method, tuple(METHODS))
        METHODS[method].require()
    ledger = open_ledger(folder)
    with finishing(ledger, train, num_jobs, on_done, should_stop) as finish:
        while specs := [s for name in wanted for s in _next_of_sweep(name, seeds, ledger)]:
            if not finish(specs):
                return False
        best = {name: best_point(sweep_losses(ledger.records, name, seeds)) for name in wanted}
        for fresh in (FRESH[:2], FRESH):
            again = [
                _spec(name, AGAIN, seed, warmup=warmup, lr=lr_at(place))
                for name, (warmup, place) in best.items()
                if fresh != FRESH or relative_error(ledger.records, name) > _LARGEST_ERROR
                for seed in fresh
            ]
            if not finish(again):
                return False
        runs = []
        for name in wanted:
            best_lr, is_noisy = lr_at(best[name][1]), relative_error(ledger.records, name) > _LARGEST_ERROR
            for method in methods:
                for start in starts if METHODS[method].uses_start else [None]:
                    lr = None if start is None else float(f"{best_lr * start:.6g}")
                    more = range(len(seeds), 2 * len(seeds)) if is_noisy else ()
                    runs += [_spec(name, method, seed, start=start, lr=lr) for seed in (*seeds, *more)]
        return finish(runs)


def _spec(
    problem: str,
    method: str,
    seed: int,
    *,
    warmup: float | None = None,
    start: float | None = None,
    lr: float | None = None,
) -> Record:
    return dict(zip(_KEY, (problem, method, warmup, start, lr, seed), strict=True))


def sweep_losses(records: Sequence[Record], problem: str, seeds: Sequence[int]) -> dict[Point, float]:
    """Mean loss over seeds of every point that has all of them."""
    losses: dict[Point, list[float]] = {}
    for record in records:
        if (record["problem"], record["method"]) == (problem, SWEEP) and record["seed"] in seeds:
            point = (record["warmup"], round(math.log10(record["lr"]) * 8))
            losses.setdefault(point, []).append(loss_of(record))
    return {point: statistics.fmean(found) for point, found in losses.items() if len(found) == len(seeds)}


def relative_error(records: Sequence[Record], problem: str) -> float:
    """Standard error of the mean of two runs of the best learning rate on fresh seeds, over that mean."""
    losses = [
        loss_of(r)
        for r in records
        if (r["problem"], r["method"]) == (problem, AGAIN) and r["seed"] in FRESH[:2]
    ]
    if len(losses) < 2 or math.inf in losses:
        return math.inf
    return statistics.stdev(losses) / math.sqrt(2) / statistics.fmean(losses)


def loss_of(record: Record) -> float:
    """Held-out loss; infinite where there is none."""
    return math.inf if record["final_loss"] is None else record["final_loss"]


def _next_of_sweep(name: str, seeds: Sequence[int], ledger: Ledger) -> list[Record]:
    points = next_points(sweep_losses(ledger.records, name, seeds), problem_of(name).learning_rate)
    return [
        _spec(name, SWEEP, seed, warmup=warmup, lr=lr_at(place)) for warmup, place in points for seed in seeds
    ]


def train(spec: Record) -> Record:
    """Run one, and add its results."""
    problem = problem_of(spec["problem"])
    is_plain = spec["method"] in (SWEEP, AGAIN)
    run = plain_with_tail(spec["warmup"]) if is_plain else METHODS[spec["method"]].run
    return spec | outcome_of(problem, run, lr=spec["lr"], seed=spec["seed"])


def outcome_of(problem: Problem, run: Callable[[Job], Trained], *, lr: float | None, seed: int) -> Record:
    """Train on a problem from a learning rate, None for its own, and give the results of a record."""
    optimizer = problem.build_optimizer(problem.parameter_groups(problem.build_model(0)), 1.0)
    job = Job(
        task=problem,
        start_lr=problem.learning_rate if lr is None else lr,
        steps=problem.num_steps,
        seed=seed,
        num_replicas=problem.num_replicas,
        optimizer_kind="sgd" if isinstance(optimizer, SGD) else "adamw",
    )
    torch.set_flush_denormal(True)  # a network that has died computes with the smallest numbers, slowly
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "training"))
        begin = time.monotonic()
        try:
            trained = run(job)
        except Diverged:
            trained = Trained({})
        finally:
            torch.set_flush_denormal(False)
        seconds = time.monotonic() - begin
    metrics = {name: value if math.isfinite(value) else None for name, value in trained.metrics.items()}
    found = trained.found_lr
    return {
        "final_loss": metrics.get("loss"),
        "metrics": metrics,
        "found_lr": found if found is not None and math.isfinite(found) else None,
        "search_steps": trained.search_steps,
        "seconds": round(seconds, 3),
    }


def plain_with_tail(warmup: float) -> Callable[[Job], Trained]:
    """Train plainly, with the tail, after a warm-up of this share of the steps."""
    return partial(plain_run, warmup=warmup, anneal_to=Recipe.anneal_to, average_tail=Recipe.average_tail)

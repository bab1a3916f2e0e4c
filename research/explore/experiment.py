"""Run the study: sweeps of fixed weight decays, then runs that explore it, on fresh seeds."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import hdet
from hdet.method.fan_out import derived_seed
from hdet.method.weight_decay import START
from research.compare.ledger import Ledger, Record, finishing
from research.explore.problem import Problem
from research.explore.problems import GRID, PROBLEMS, names
from research.zoo.problem import Split

__all__ = ["FRESH", "open_ledger", "run_study", "sweep_of"]

_KEY = ("problem", "method", "start", "lr", "decay", "seed")
_SWEPT = (0, 1)
"""Seeds that choose the best of a sweep, ..."""
FRESH = (10, 11, 12, 13, 14)
"""... and those on which everything is compared."""
_LR_FACTORS = (1 / 3, 1.0, 3.0)
_JOINT_GRID = (1.0, 3.3, 10.0, 33.0)
_GUESSES = {"adamw": (1e-5, 1e-3, 1e-1), "sgd": (5e-4, 0.05, 5.0), "muon": (2e-4, 0.02, 2.0)}


def open_ledger(folder: str | Path) -> Ledger:
    """The runs of a folder."""
    return Ledger(Path(folder), "explore.jsonl", _KEY, result="accuracy")


def _spec(problem: str, method: str, start: str, lr: float | None, decay: float, seed: int) -> Record:
    lr = None if lr is None else float(f"{lr:.4g}")
    return dict(zip(_KEY, (problem, method, start, lr, float(f"{decay:.4g}"), seed), strict=True))


def run_study(
    folder: str | Path,
    *,
    split: Split | None = None,
    problems: Sequence[str] = (),
    num_seeds: int = 5,
    stages: Sequence[str] = ("main", "starts", "lr", "joint"),
    num_jobs: int = 0,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Run what the folder does not have yet; whether all is there in the end.

    Args:
        folder: of ``explore.jsonl``.
        split: problems of this split only.
        problems: these only.
        num_seeds: of the comparison.
        stages: ``main`` has the bars, ``starts`` further starts and baselines, ``lr`` wrong learning rates,
            ``joint`` unknown ones against a sweep of both.
        num_jobs: runs at a time; 0 for one per core.
        on_done: called with the number of runs done, and that of all as far as it is known.
        should_stop: asked now and then.
    """
    wanted = [name for name in names(split) if not problems or name in problems]
    ledger = open_ledger(folder)
    with finishing(ledger, train, num_jobs, on_done, should_stop) as finish:
        if not finish([_spec(name, "find", "", None, PROBLEMS[name].default_decay, 0) for name in wanted]):
            return False
        rates = {name: rate_of(ledger.records, name) for name in wanted}
        while specs := [s for name in wanted for s in _next_of_sweep(name, rates[name], ledger)]:
            if not finish(specs):
                return False
        for stage in stages:
            specs = [
                spec
                for name in wanted
                for spec in _specs(stage, name, rates[name], ledger, FRESH[:num_seeds])
            ]
            if not finish(specs):
                return False
        if "joint" in stages:  # the winners again, on fresh seeds
            return finish([s for name in wanted for s in _joint_winner(name, ledger.records, FRESH[:3])])
        return True


def rate_of(records: Sequence[Record], name: str) -> float:
    """The learning rate that the search has found for a problem at its default decay."""
    return next(r["found_lr"] for r in records if (r["problem"], r["method"]) == (name, "find"))


def _next_of_sweep(name: str, lr: float, ledger: Ledger) -> list[Record]:
    problem, grid = PROBLEMS[name], list(GRID)
    losses = sweep_of(ledger.records, name)
    while losses and len(losses) >= len(grid):  # goes on where the best is at an end
        best = min(losses, key=losses.__getitem__)
        ends = {problem.decay_at(grid[0], lr): grid[0] / 3.3, problem.decay_at(grid[-1], lr): grid[-1] * 3.3}
        if best not in ends or not 1e-3 < ends[best] < 1e4:
            return []
        grid = sorted([*grid, ends[best]])
    specs = [_spec(name, "sweep", "", lr, problem.decay_at(g, lr), s) for g in grid for s in _SWEPT]
    return [spec for spec in specs if spec not in ledger]


def sweep_of(records: Sequence[Record], name: str) -> dict[float, float]:
    """Mean held-out loss of every weight decay of the sweep that has all its seeds."""
    losses: dict[float, list[float]] = {}
    for record in records:
        if (record["problem"], record["method"]) == (name, "sweep"):
            losses.setdefault(record["decay"], []).append(loss_of(record))
    return {decay: statistics.fmean(found) for decay, found in losses.items() if len(found) == len(_SWEPT)}


def loss_of(record: Record) -> float:
    """Held-out loss; infinite where there is none."""
    return math.inf if record["final_loss"] is None else record["final_loss"]


def _specs(stage: str, name: str, lr: float, ledger: Ledger, seeds: Sequence[int]) -> list[Record]:
    problem = PROBLEMS[name]
    losses = sweep_of(ledger.records, name)
    best, default = min(losses, key=losses.__getitem__), problem.default_decay
    if stage == "main":
        runs = [("fixed", "default", default), ("fixed", "best", best)]
        runs += [("explore", "default", default), ("explore", "best", best)]
        return [_spec(name, m, start, lr, decay, s) for m, start, decay in runs for s in seeds]
    if stage == "starts":
        auto = problem.decay_at(START, lr)
        runs = [("fixed", "auto", auto), ("explore", "auto", auto)]
        runs += [("explore", "best x0.1", best / 10), ("explore", "best x10", best * 10)]
        runs += [("fixed", "best x0.1", best / 10), ("fixed", "best x10", best * 10)]
        runs += [("probe added", "default", default), ("early stopping", "default", default)]
        return [_spec(name, m, start, lr, decay, s) for m, start, decay in runs for s in seeds[:3]]
    if stage == "lr":
        return [
            _spec(name, m, f"default, lr x{factor:.3g}", lr * factor, default, s)
            for m in ("fixed", "explore")
            for factor in (1 / 3, 3.0)
            for s in seeds[:2]
        ]
    runs = [
        _spec(name, "joint sweep", "", lr * factor, problem.decay_at(g, lr * factor), 0)
        for factor in _LR_FACTORS
        for g in _JOINT_GRID
    ]
    guesses = _GUESSES[problem.optimizer]
    return runs + [_spec(name, "find and explore", "default", g, default, FRESH[0]) for g in guesses]


def _joint_winner(name: str, records: Sequence[Record], seeds: Sequence[int]) -> list[Record]:
    swept = [r for r in records if (r["problem"], r["method"]) == (name, "joint sweep")]
    best = min(swept, key=loss_of)
    return [_spec(name, "joint best", "", best["lr"], best["decay"], s) for s in seeds]


# --- one run ------------------------------------------------------------------------------------------


def train(spec: Record) -> Record:
    """Run one, and add its results."""
    torch.set_flush_denormal(True)
    problem, began = PROBLEMS[spec["problem"]], time.monotonic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(spec["seed"], "explore training"))
        found = _search(problem, spec) if spec["method"] in ("find", "find and explore") else None
        result = {"found_lr": None if found is None else found.lr[0], "final_loss": None}
        result |= {"accuracy": None, "scaled_loss": None, "found_decay": None}
        if spec["method"] != "find":
            result |= _run(problem, spec, found)
    torch.set_flush_denormal(False)
    return spec | result | {"seconds": round(time.monotonic() - began, 3)}


def _search(problem: Problem, spec: Record) -> hdet.FoundLR:
    model = problem.model(spec["seed"])
    guess = problem.guess if spec["lr"] is None else spec["lr"]
    optimizer = problem.optimizer_of(model, guess, spec["decay"])
    batches = problem.batches(1000 + spec["seed"])
    return hdet.find_lr(model, optimizer, batches, problem.loss, total_steps=problem.num_steps)


def probe_of(problem: Problem) -> hdet.Probe:
    """The held-out data that a run may look at."""
    x, y = problem.parts().probe
    batches = list(zip(x.split(50), y.split(50), strict=True))
    if len(batches) < 8:  # windows of text
        batches = list(zip(x.split(8), y.split(8), strict=True))
    return hdet.Probe(batches, problem.loss)


def _run(problem: Problem, spec: Record, found: hdet.FoundLR | None) -> Record:
    parts = problem.parts()
    model = problem.model(spec["seed"])
    optimizer = problem.optimizer_of(model, spec["lr"], spec["decay"])
    explores = spec["method"] in ("explore", "find and explore")
    auto = hdet.AutoLR(
        optimizer,
        total_steps=problem.num_steps,
        model=model,
        found=found,
        controllers=[hdet.HeldOutWeightDecay()] if explores else [],
        probe=probe_of(problem) if explores else None,
    )
    kept, lowest = None, math.inf
    batches = problem.batches(spec["seed"], with_probe=spec["method"] == "probe added")
    for step in range(1, problem.num_steps + 1):
        loss = problem.loss(model, next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)
        if spec["method"] == "early stopping" and step % (problem.num_steps // 20) == 0:
            seen = problem.measured(model, parts.probe).loss
            if seen < lowest:
                kept, lowest = copy.deepcopy(model.state_dict()), seen
    if kept is not None:
        model.load_state_dict(kept)
    measured = problem.measured(model, parts.test)
    decay = next(g["weight_decay"] for g in optimizer.param_groups if g["weight_decay"] > 0)
    return {
        "final_loss": measured.loss if math.isfinite(measured.loss) else None,
        "accuracy": measured.accuracy,
        "scaled_loss": measured.scaled_loss,
        "found_decay": decay,
    }

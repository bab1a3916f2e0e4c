"""Run the ablation: the grid, then every row at the learning rates that it gives."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hdet.checks import require_choice, require_count
from hdet.errors import HdetError
from hdet.lab.pool import Pool
from hdet.lab.tasks.task import load_task
from research.ablation.rules import lattice_lr, next_points, point_of
from research.ablation.summary import GRID, Ablation, best_of, choose, judged, rows_to_run
from research.ablation.training import train
from research.compare.ledger import Ledger, Record, read_ledger, run_missing
from research.compare.summary import CASE

__all__ = ["ablate", "read_ablation"]

_FILE = "ablation.jsonl"
_KEY = (*CASE, "row", "lr", "seed", "settings")
_NUM_EXPECTED = 13 + 20  # learning rates of the grid, and other rows: for the progress bar alone


def ablate(
    task: str,
    *,
    task_options: Mapping[str, Any] | None = None,
    optimizer: str = "adamw",
    seeds: int | Sequence[int] = 3,
    decisive_seeds: int = 0,
    lrs: Sequence[float] = (),
    steps: int | None = None,
    replicas: int = 8,
    folder: str | Path,
    num_jobs: int = 0,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Ablation:
    """Repeat the paper's Table 1, and what it leaves out; runs that are there are not made again.

    Args:
        task: a built-in one or ``path/to/file.py:MyTask``.
        task_options: of its constructor.
        optimizer: ``"adamw"`` or ``"sgd"``.
        seeds: how many, or which.
        decisive_seeds: how many for the rows that a verdict hangs on, if that is more.
        lrs: learning rates of the grid; without any it widens by rule until Low, High and the best are known.
        steps: optimizer steps of every run; None for the task's own number.
        replicas: N, and streams of batches that every run takes.
        folder: of ``ablation.jsonl``.
        num_jobs: runs at a time; 0 for one per core.
        on_done: called with the number of runs done and that of all, as far as it is known.
        should_stop: asked now and then.
    """
    seeds = list(range(require_count("seeds", seeds))) if isinstance(seeds, int) else list(seeds)
    if not seeds:
        raise ValueError("seeds must hold at least one, got none")
    options = dict(task_options or {})
    built = load_task(task, options)
    require_count("replicas", replicas)
    length = require_count(
        "steps",
        built.num_steps if steps is None else steps,
        at_least=50,
        remedy="shorter runs say nothing",
    )
    require_choice("optimizer", optimizer, ("adamw", "sgd"))
    base: Record = {
        "task": task,
        "task_options": options,
        "optimizer": optimizer,
        "steps": length,
        "replicas": replicas,
    }
    base["command"] = _command(base, seeds, decisive_seeds, lrs)
    ledger = Ledger(Path(folder), _FILE, _KEY, "crashed")
    grid: dict[float, dict[int, Record]] = {}
    done: list[Record] = []

    with Pool(num_jobs) as pool:

        def finish(specs: list[Record], total: int) -> bool:
            count = len(done) + sum(spec in ledger for spec in specs)

            def one_more(more: int = 1) -> None:
                nonlocal count
                count += more
                on_done(min(count, total), total)

            one_more(0)
            is_complete = run_missing(
                specs, ledger, pool, train=train, on_done=one_more, should_stop=should_stop
            )
            done.extend(ledger.find(specs))
            return is_complete

        while wanted := [lr for lr in lrs or _next(grid, built.learning_rate) if lr not in grid]:
            runs = {lr: [_spec(base, GRID, lr, seed, {}) for seed in seeds] for lr in wanted}
            if not finish([s for specs in runs.values() for s in specs], _NUM_EXPECTED * len(seeds)):
                return Ablation(done, is_complete=False)
            grid |= {lr: {r["seed"]: r for r in ledger.find(specs)} for lr, specs in runs.items()}
        chosen = choose(dict(sorted(grid.items())))
        if chosen is None:
            raise HdetError(
                f"the grid of {task!r} must hold a learning rate without a loss spike, but every one from "
                f"{min(grid):g} on has one for a seed: check the task, or give it more --steps"
            )
        more = sorted({*seeds, *range(decisive_seeds)})
        specs = [
            _spec(base, row.key, lr, seed, row.settings(length))
            for row, lr in sorted(rows_to_run(chosen), key=lambda entry: not entry[0].is_decisive)
            for seed in (more if row.is_decisive else seeds)
            if row.key != GRID or seed not in seeds
        ]
        is_complete = finish(specs, len(done) + len(specs))
    return Ablation(done, is_complete)


def read_ablation(folders: Sequence[str | Path]) -> Ablation:
    """What earlier ablations left in these folders."""
    records: dict[str, Record] = {}
    for folder in folders:
        path = Path(folder) / _FILE
        if not path.is_file():
            raise ValueError(f"{str(folder)!r} must be the folder of an ablation, but it has no {_FILE}")
        records |= read_ledger(path, _KEY, "crashed")
    return Ablation(list(records.values()))


def _next(grid: Mapping[float, Mapping[int, Record]], middle_lr: float) -> list[float]:
    best = best_of(grid)
    runs = {point_of(lr): [judged(run, *best) for run in by_seed.values()] for lr, by_seed in grid.items()}
    losses = {
        point: statistics.fmean(math.inf if run["crashed"] else run["final_loss"] for run in found)
        for point, found in runs.items()
    }
    crashes = {point: [run["crashed"] for run in found] for point, found in runs.items()}
    spikes = {point: [run["has_spike"] for run in found] for point, found in runs.items()}
    return [lattice_lr(point) for point in next_points(losses, crashes, spikes, middle_lr)]


def _spec(base: Record, row: str, lr: float, seed: int, settings: Mapping[str, Any]) -> Record:
    return base | {"row": row, "lr": lr, "seed": seed, "settings": dict(settings)}


def _command(base: Record, seeds: Sequence[int], decisive_seeds: int, lrs: Sequence[float]) -> str:
    words = ["python", "-m", "research", "ablate", "--seeds", str(len(seeds))]
    words += ["--decisive-seeds", str(decisive_seeds)] if decisive_seeds else []
    words += ["--lrs", ",".join(f"{lr:g}" for lr in lrs)] if lrs else []
    for name in ("task", "steps", "replicas", "optimizer"):
        words += [f"--{name}", str(base[name])]
    for name, value in base["task_options"].items():
        words += ["--option", f"{name}={value}"]
    return shlex.join(words)

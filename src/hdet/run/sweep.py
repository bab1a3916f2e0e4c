"""Plain runs over a grid of learning rates, several at a time."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hdet.core.checks import require_count, require_number
from hdet.run.config import RunConfig
from hdet.run.folder import RunFolder
from hdet.run.runner import run, task_facts
from hdet.run.signals import stop_on_signal
from hdet.tasks.task import load_task

__all__ = ["Sweep", "log_grid", "run_many", "sweep"]


@dataclass(frozen=True)
class Sweep:
    """The results of all points, by learning rate."""

    points: list[dict[str, Any]]
    is_complete: bool

    @property
    def best(self) -> dict[str, Any] | None:
        """The point with the lowest held-out loss; None if none has one."""
        valid = [p for p in self.points if p["status"] == "finished" and p["final_loss"] is not None]
        return min(valid, key=lambda p: p["final_loss"], default=None)


def log_grid(low: float, high: float, per_decade: int) -> list[float]:
    """Points from ``low`` to ``high`` at powers of 10^(1/per_decade), rounded to four digits.

    >>> log_grid(0.01, 1, 2)
    [0.01, 0.03162, 0.1, 0.3162, 1.0]
    """
    require_number("low", low, above=0)
    require_number("high", high, at_least=low)
    require_count("per_decade", per_decade)
    # On a fixed lattice, so that a finer grid holds the coarser one's points and they are not run again.
    first = math.ceil(math.log10(low) * per_decade - 1e-6)
    last = math.floor(math.log10(high) * per_decade + 1e-6)
    return [float(f"{10 ** (k / per_decade):.4g}") for k in range(first, last + 1)]


def sweep(
    config: RunConfig,
    lrs: Sequence[float],
    path: Path,
    *,
    num_jobs: int = 0,
    on_done: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Sweep:
    """Run the settings at every learning rate, each in its own folder; finished points are taken as they are.

    Args:
        config: everything but the learning rate.
        lrs: the learning rates.
        path: the folder of the sweep.
        num_jobs: runs at a time; 0 for one per core.
        on_done: called with the number of points done.
        should_stop: asked now and then; what runs is stopped and saved.
    """
    if not lrs:
        raise ValueError("lrs must hold at least one learning rate, got none: widen --low and --high")
    points = {lr: (dataclasses.replace(config, lr=lr), path / f"lr{lr:g}") for lr in lrs}
    results = run_many(list(points.values()), num_jobs=num_jobs, on_done=on_done, should_stop=should_stop)
    found = [result for result in results if result is not None and result["status"] != "stopped"]
    return Sweep(points=found, is_complete=len(found) == len(lrs))


def run_many(
    jobs: Sequence[tuple[RunConfig, Path]],
    *,
    num_jobs: int = 0,
    on_done: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any] | None]:
    """Run every job in its folder, several at a time; results in the same order, None where it was stopped.

    A folder with a finished run of the same settings is not run again; with other settings it is an error.
    """
    results: list[dict[str, Any] | None] = [_finished(config, path) for config, path in jobs]
    missing = [i for i, result in enumerate(results) if result is None]
    done = len(jobs) - len(missing)
    on_done(done)
    num_jobs = min(require_count("num_jobs", num_jobs, at_least=0) or os.cpu_count() or 1, len(missing))
    if num_jobs <= 0:
        return results
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context, initializer=_one_thread) as pool:
        futures = {pool.submit(_run_one, *jobs[i]): i for i in missing}
        waiting = set(futures)
        try:
            while waiting:
                finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in finished:
                    results[futures[future]] = future.result()
                    done += 1
                on_done(done)
                if should_stop():
                    break
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        for future, i in futures.items():
            if future.done() and not future.cancelled() and results[i] is None:
                results[i] = future.result()
    return results


def _finished(config: RunConfig, path: Path) -> dict[str, Any] | None:
    folder = RunFolder(path)
    if not folder.result.exists():
        return None
    there = folder.read_config()
    if dataclasses.replace(there, name="") != dataclasses.replace(config, name=""):
        differing = [
            field.name
            for field in dataclasses.fields(config)
            if field.name != "name" and getattr(there, field.name) != getattr(config, field.name)
        ]
        raise ValueError(
            f"out must be a folder of the same settings, but the run in {str(path)!r} has another "
            f"{', '.join(differing)}: give another --out"
        )
    result = json.loads(folder.result.read_text(encoding="utf-8"))
    return None if result["status"] == "stopped" else result


def _one_thread() -> None:
    torch.set_num_threads(1)


def _run_one(config: RunConfig, path: Path) -> dict[str, Any]:
    """In a worker process. Ctrl-C reaches it too: it stops, and the point is run again another time."""
    task = load_task(config.task, config.task_options)
    RunFolder(path).remove_run()
    folder = RunFolder.create(path, config, task_facts(task))
    with stop_on_signal() as should_stop:
        return run(config, folder, task=task, should_stop=should_stop).to_json()

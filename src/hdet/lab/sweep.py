"""Plain runs over a grid of learning rates, several at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdet.checks import require_count, require_number
from hdet.lab.pool import Pool
from hdet.lab.tasks.task import load_task
from hdet.lab.train.config import RunConfig
from hdet.lab.train.folder import RunFolder
from hdet.lab.train.runner import run, task_facts


@dataclass(frozen=True)
class Sweep:
    """The results of all points, by learning rate."""

    points: list[dict[str, Any]]
    is_complete: bool

    @property
    def best(self) -> dict[str, Any] | None:
        """Find the point with the lowest held-out loss; None if none has one."""
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
    """Run the settings at every learning rate, several at a time, each in its own folder.

    A folder with a finished run of the same settings is not run again; with other settings it is an error.

    Args:
        config: everything but the learning rate.
        lrs: the learning rates.
        path: the folder of the sweep.
        num_jobs: runs at a time; 0 for one per core.
        on_done: called with the number of points done.
        should_stop: asked now and then; a point that is under way is run again another time.
    """
    if not lrs:
        raise ValueError("lrs must hold at least one learning rate, got none: widen --low and --high")
    folders = {path / f"lr{lr:g}": dataclasses.replace(config, lr=lr) for lr in lrs}  # equal ones are one
    points = [(config, folder) for folder, config in folders.items()]
    results = [_finished(*point) for point in points]
    missing = [i for i, result in enumerate(results) if result is None]
    num_done = len(points) - len(missing)
    on_done(num_done)
    with Pool(num_jobs) as pool:
        jobs = [points[i] for i in missing]
        for place, result in pool.run(_run_one, jobs, should_stop=should_stop):
            results[missing[place]] = result
            num_done += 1
            on_done(num_done)
    found = [result for result in results if result is not None]
    return Sweep(points=found, is_complete=len(found) == len(points))


def _finished(config: RunConfig, path: Path) -> dict[str, Any] | None:
    result = RunFolder(path).read_result()
    if result is None:
        return None
    there, wanted = RunFolder(path).read_config().to_json(), config.to_json()
    if differing := [name for name in wanted if name != "name" and there[name] != wanted[name]]:
        raise ValueError(
            f"out must be a folder of the same settings, but the run in {str(path)!r} has another "
            f"{', '.join(differing)}: give another --out"
        )
    return result


def _run_one(config: RunConfig, path: Path) -> dict[str, Any]:
    task = load_task(config.task, config.task_options)
    RunFolder(path).remove_run()  # of one that was stopped
    folder = RunFolder.create(path, config, task_facts(task))
    return run(config, folder, task=task).to_json()

"""Compare hdet's finders with what a user could do instead, from several starts, at equal budget."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hdet.checks import require_choice, require_count, require_number
from hdet.errors import HdetError
from hdet.lab.pool import Pool
from hdet.lab.tasks.task import load_task
from research.compare.ledger import (
    SWEEP,
    Ledger,
    Record,
    read_ledger,
    run_missing,
    timed_in_turn,
    train_one,
)
from research.compare.summary import (
    BASELINE,
    CASE,
    Case,
    Cell,
    Comparison,
    Row,
    is_timed_run,
    loss_of,
)
from research.markdown import table_line
from research.peers import DEFAULTS, METHODS
from research.peers.grid import lr_at, next_points

__all__ = ["Case", "Cell", "Comparison", "Row", "compare", "read_comparison", "table"]


def compare(
    tasks: Sequence[str | tuple[str, Mapping[str, Any]]],
    *,
    methods: Sequence[str] = DEFAULTS,
    optimizers: Sequence[str] = ("adamw",),
    starts: Sequence[float] = (0.1, 1.0, 10.0),
    seeds: int | Sequence[int] = 3,
    steps: int | None = None,
    replicas: int = 8,
    folder: str | Path,
    num_jobs: int = 0,
    is_timed: bool = False,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Sweep every task, then train it with every method from every start; what is there is not run again.

    Args:
        tasks: names, or names with options.
        methods: names from :data:`research.peers.METHODS`.
        optimizers: ``"adamw"``, ``"sgd"`` or both.
        starts: starting learning rates as factors on the best one of the sweep.
        seeds: how many, or which.
        steps: optimizer steps of every run; None for each task's own number.
        replicas: streams of batches that every run takes.
        folder: of ``compare.jsonl``.
        num_jobs: runs at a time; 0 for one per core.
        is_timed: measure each method's wall-clock too, by one more run in turn with a plain one.
        on_done: called with the number of runs done and that of all, as far as it is known.
        should_stop: asked now and then.
    """
    seeds = list(range(require_count("seeds", seeds))) if isinstance(seeds, int) else list(seeds)
    starts = sorted({require_number("starts", start, above=0) for start in starts})
    for name, values in (("tasks", tasks), ("methods", methods), ("optimizers", optimizers)):
        if not values:
            raise ValueError(f"{name} must hold at least one, got none")
    if not (seeds and starts):
        raise ValueError(f"seeds and starts must hold at least one each, got {seeds} and {starts}")
    for method in methods:
        require_choice("methods", method, tuple(METHODS))
    bases: list[tuple[Record, float]] = []  # and the task's own learning rate
    for entry in tasks:
        name, options = (entry, {}) if isinstance(entry, str) else entry
        task = load_task(name, options)
        length = require_count("steps", task.num_steps if steps is None else steps)
        for method in methods:  # before anything runs
            METHODS[method].require(length)
        for optimizer in optimizers:
            require_choice("optimizers", optimizer, ("adamw", "sgd"))
            values = (name, dict(options), optimizer, length, require_count("replicas", replicas))
            bases.append((dict(zip(CASE, values, strict=True)), task.learning_rate))

    ledger = Ledger(Path(folder))
    trained = [METHODS[name] for name in dict.fromkeys(methods) if name != BASELINE]
    num_starts = sum(len(starts) if method.uses_start else 1 for method in trained)
    total = len(bases) * (len(seeds) * (METHODS[BASELINE].cost + num_starts) + is_timed * len(trained))
    done = 0

    def count(more: int = 1) -> None:
        nonlocal done
        done += more
        on_done(min(done, total), total)

    with Pool(num_jobs) as pool:

        def finish(specs: list[Record]) -> bool:
            count(sum(spec in ledger for spec in specs))
            return run_missing(specs, ledger, pool, on_done=count, should_stop=should_stop)

        best_lrs, is_complete = _sweep(bases, seeds, ledger, finish)
        if is_complete:
            is_complete = finish(
                [
                    base | {"method": method.name, "start": start, "seed": seed, "lr": lr}
                    for (base, _), best in zip(bases, best_lrs, strict=True)
                    for method in trained
                    for start, lr in _starts(best, starts if method.uses_start else [None])
                    for seed in seeds
                ]
            )
    if is_timed and is_complete:  # once nothing else runs
        is_complete = _time(bases, [method.name for method in trained], ledger, count, should_stop)
    return Comparison(ledger.records, is_complete)


def _time(
    bases: Sequence[tuple[Record, float]],
    methods: Sequence[str],
    ledger: Ledger,
    count: Callable[[], None],
    should_stop: Callable[[], bool],
) -> bool:
    """Add its relative wall-clock to a run of each method, that from the best start; whether none is missing.

    One is enough: a method takes much the same time from every start.
    """
    for base, _ in bases:
        for method in methods:
            runs = [r for r in ledger.records if r["method"] == method and base.items() <= r.items()]
            runs = [run for run in runs if not run["diverged"]]
            if runs and METHODS[method].runs_here and not any(map(is_timed_run, runs)):
                nearest = min(runs, key=lambda run: abs(math.log(run["start"] or 1.0)))
                timed = None if should_stop() else train_one(nearest, timed_in_turn)
                if timed is None:
                    return False
                ledger.add(timed)
            count()
    return True


def _starts(best_lr: float, starts: Sequence[float | None]) -> list[tuple[float | None, float | None]]:
    """Factors and learning rates; the rounding makes them the same in a later run."""
    return [(start, None if start is None else float(f"{best_lr * start:.6g}")) for start in starts]


def _sweep(
    bases: Sequence[tuple[Record, float]],
    seeds: Sequence[int],
    ledger: Ledger,
    finish: Callable[[list[Record]], bool],
) -> tuple[list[float], bool]:
    """The best learning rate of each base, chosen by the mean over seeds; and whether nothing is missing."""
    means: list[dict[int, float]] = [{} for _ in bases]
    while True:
        wanted = [next_points(known, middle) for known, (_, middle) in zip(means, bases, strict=True)]
        if not any(wanted):
            break
        runs = {
            (i, point): [
                bases[i][0] | {"method": SWEEP, "start": None, "seed": s, "lr": lr_at(point)} for s in seeds
            ]
            for i, points in enumerate(wanted)
            for point in points
        }
        if not finish([spec for specs in runs.values() for spec in specs]):
            return [], False
        for (i, point), specs in runs.items():
            means[i][point] = statistics.fmean(loss_of(record) for record in ledger.find(specs))
    best = [min(known, key=lambda point: known[point]) for known in means]
    for known, point, (base, _) in zip(means, best, bases, strict=True):
        if not math.isfinite(known[point]):
            raise HdetError(
                f"the sweep of {base['task']!r} must train at one learning rate at least, but every one from "
                f"{lr_at(min(known)):g} to {lr_at(max(known)):g} diverged for a seed: check the task"
            )
    return [lr_at(point) for point in best], True


def read_comparison(folders: Sequence[str | Path]) -> Comparison:
    """What earlier comparisons left in these folders."""
    records: dict[str, Record] = {}
    for folder in folders:
        path = Path(folder) / "compare.jsonl"
        if not path.is_file():
            raise ValueError(
                f"{str(folder)!r} must be the folder of a comparison, but it has no compare.jsonl"
            )
        records |= read_ledger(path)
    return Comparison(list(records.values()))


def table(comparison: Comparison) -> str:
    """The comparison as Markdown: a table per task and optimizer."""
    parts = []
    for case in comparison.cases:
        lines = [f"### {case.title}", ""]
        if case.best_lr is None:
            parts.append("\n".join([*lines, "The sweep has no result yet."]))
            continue
        lines += [f"Best of the sweep: held-out loss {case.best_loss:.5g} at LR {case.best_lr:g}.", ""]
        head = ["method", *(f"x{start:g}" for start in case.starts), "runs", "time"]
        lines += [table_line(head), table_line(["---", *["---:"] * (len(head) - 1)])]
        for row in case.rows:
            cells = [str(row.cells[start]) if start in row.cells else "-" for start in case.starts]
            lines.append(table_line([row.method, *cells, str(row.cost), row.time]))
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, NOTES]) + "\n"


NOTES = (
    "Held-out loss over that of the best LR of the sweep, mean ± standard deviation over seeds, for a start "
    "at the best LR times the factor at the head; every run has the same steps and batches. Runs: how many "
    "of them a method takes. Time: wall-clock over one plain run, in one process: methods whose N replicas "
    "differ (pbt, local_sgd, diloco, hdet_paper, hdet_log) compute all of them here, and would not on N "
    "devices. With a ~ it is from runs at different times, beside other work; without, from one run in turn "
    "with a plain one (--time)."
)

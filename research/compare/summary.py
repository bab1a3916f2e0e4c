"""What a comparison's runs come to: ratios to the best of the sweep, by method and start."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from research.compare.ledger import SWEEP, Record
from research.peers import METHODS

__all__ = [
    "BASELINE",
    "CASE",
    "Case",
    "Cell",
    "Comparison",
    "Row",
    "by_case",
    "case_title",
    "is_timed_run",
    "loss_of",
]

CASE = ("task", "task_options", "optimizer", "steps", "replicas")
"""The fields that runs must share to be compared."""
BASELINE = "best_of_sweep"


@dataclass(frozen=True)
class Cell:
    """The runs of a method from one start, one per seed."""

    ratios: list[float]
    """Final loss over the best of the sweep; infinite for a run that diverged."""
    found_lrs: list[float]

    @property
    def num_diverged(self) -> int:
        """Runs without a finite ratio."""
        return sum(not math.isfinite(ratio) for ratio in self.ratios)

    @property
    def mean(self) -> float:
        """Mean ratio; infinite if a run diverged."""
        return math.inf if self.num_diverged else statistics.fmean(self.ratios)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds; None for one seed, or if a run diverged."""
        return statistics.stdev(self.ratios) if len(self.ratios) > 1 and not self.num_diverged else None

    @property
    def found_lr(self) -> float | None:
        """Geometric mean of what was found."""
        lrs = [lr for lr in self.found_lrs if lr > 0]
        return statistics.geometric_mean(lrs) if lrs else None

    def __str__(self) -> str:
        if self.num_diverged:
            return f"diverged {self.num_diverged}/{len(self.ratios)}"
        deviation = "" if self.deviation is None else f" ± {self.deviation:.3f}"
        return f"{self.mean:.3f}{deviation}"


@dataclass(frozen=True)
class Row:
    """One method."""

    method: str
    cells: dict[float, Cell]
    """By start."""
    cost: int
    """Runs of the given length that it takes."""
    relative_seconds: float | None
    """Its wall-clock over that of one plain run."""
    is_timed: bool = False
    """Whether the two took turns, so that it can be trusted."""

    @property
    def time(self) -> str:
        """For a table; a tilde before what cannot be trusted."""
        if self.relative_seconds is None:
            return "-"
        return ("" if self.is_timed else "~") + f"{self.relative_seconds:.2f}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """All about one task, optimizer and length."""

    task: str
    task_options: dict[str, Any]
    optimizer: str
    steps: int
    replicas: int
    seeds: list[int]
    sweep: dict[float, float]
    """Mean final loss over seeds by learning rate; infinite where a run diverged."""
    best_lr: float | None
    """Of the sweep; None while it has nothing to show."""
    best_loss: float
    starts: list[float]
    rows: list[Row]

    @property
    def title(self) -> str:
        """In one line."""
        return case_title({name: getattr(self, name) for name in CASE}, len(self.seeds))


@dataclass(frozen=True)
class Comparison:
    """The runs, and what follows from them."""

    records: list[Record]
    is_complete: bool = True

    @property
    def cases(self) -> list[Case]:
        """One per task, optimizer and length, in the order of the records."""
        return [_case(records) for records in by_case(self.records)]


def by_case(records: Sequence[Record]) -> list[list[Record]]:
    """Runs that may be compared with each other, in the order of the records."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(json.dumps([record[k] for k in CASE], sort_keys=True), []).append(record)
    return list(groups.values())


def case_title(facts: Mapping[str, Any], num_seeds: int, *more: int) -> str:
    """The fields of :data:`CASE` in one line; ``more`` are numbers of seeds of single rows.

    >>> facts = {"task": "charlm", "task_options": {"width": 64}, "optimizer": "sgd"}
    >>> case_title(facts | {"steps": 9, "replicas": 8}, 1)
    'charlm, width=64, sgd: 9 steps, 8 replicas, 1 seed'
    >>> case_title(facts | {"steps": 9, "replicas": 8}, 3, 3, 10)
    'charlm, width=64, sgd: 9 steps, 8 replicas, 3 to 10 seeds'
    """
    options = "".join(f", {name}={value}" for name, value in facts["task_options"].items())
    most = max((num_seeds, *more))
    seeds = (
        f"{num_seeds} to {most} seeds" if most > num_seeds else f"{num_seeds} seed{'s' * (num_seeds != 1)}"
    )
    return (
        f"{facts['task']}{options}, {facts['optimizer']}: {facts['steps']} steps, {facts['replicas']} "
        f"replicas, {seeds}"
    )


def _case(records: Sequence[Record]) -> Case:
    points: dict[float, dict[int, Record]] = {}
    for record in records:
        if record["method"] == SWEEP:
            points.setdefault(record["lr"], {})[record["seed"]] = record
    most = max((len(runs) for runs in points.values()), default=0)
    full = {lr: runs for lr, runs in sorted(points.items()) if len(runs) == most}
    sweep = {lr: statistics.fmean(map(loss_of, runs.values())) for lr, runs in full.items()}
    best_lr = min(sweep, key=lambda lr: sweep[lr], default=math.nan)
    best_loss = sweep.get(best_lr, math.inf)
    case = {name: records[0][name] for name in CASE}
    if not (math.isfinite(best_loss) and best_loss > 0):
        return Case(**case, seeds=[], sweep=sweep, best_lr=None, best_loss=best_loss, starts=[], rows=[])
    # Another best, after a larger sweep, makes other starts of the same factors.
    valid = [
        record
        for record in records
        if record["method"] in METHODS
        and (record["start"] is None or math.isclose(record["lr"], record["start"] * best_lr, rel_tol=1e-4))
    ]
    starts = sorted({record["start"] for record in valid if record["start"] is not None}) or [1.0]
    best_runs = list(full[best_lr].values())
    plain = [r for r in valid if r["method"] == "plain_linear" and r["start"] == 1] or best_runs
    unit = statistics.fmean(record["seconds"] for record in plain)
    sweep_seconds = sum(run["seconds"] for runs in full.values() for run in runs.values()) / most
    baseline = Cell([loss_of(record) / best_loss for record in best_runs], [best_lr] * most)
    rows = [Row(BASELINE, dict.fromkeys(starts, baseline), len(sweep), sweep_seconds / unit)]
    for method in METHODS.values():
        runs = [record for record in valid if record["method"] == method.name]
        if runs:
            cells = {
                start: Cell(
                    [loss_of(r) / best_loss for r in here], [r["found_lr"] for r in here if r.get("found_lr")]
                )
                for start in starts
                if (here := [r for r in runs if r["start"] in (start, None)])
            }
            times = [record["relative_seconds"] for record in runs if is_timed_run(record)]
            is_timed = bool(times)
            times = times or [record["seconds"] / unit for record in runs if not record["diverged"]]
            time = statistics.fmean(times) if times else None
            rows.append(Row(method.name, cells, method.cost, time, is_timed))
    return Case(
        **case,
        seeds=sorted(full[best_lr]),
        sweep=sweep,
        best_lr=best_lr,
        best_loss=best_loss,
        starts=starts,
        rows=rows,
    )


def is_timed_run(record: Record) -> bool:
    """Whether a run's wall-clock was measured in turn with a plain run's."""
    return record.get("relative_seconds") is not None


def loss_of(record: Record) -> float:
    """The final loss; infinite for a run that diverged."""
    return math.inf if record["diverged"] or record["final_loss"] is None else record["final_loss"]

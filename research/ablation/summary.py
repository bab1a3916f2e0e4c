"""What the runs come to: Low, High and the best learning rate, and the rows at them."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hdet.lab.ablation import LOW_FACTOR, mean_text
from hdet.lab.intervals import Runs
from research.ablation.rows import ROWS, Row
from research.ablation.rules import choose_high, choose_safe, is_lost
from research.compare.ledger import Record
from research.compare.summary import CASE, by_case, case_title

__all__ = ["GRID", "Ablation", "Case", "Chosen", "Result", "best_of", "choose", "judged", "rows_to_run"]

GRID = "grid"
"""Name of a plain run of the grid in the ledger."""


@dataclass(frozen=True)
class Chosen:
    """The learning rates that the grid gives."""

    low: float
    high: float
    """The largest one of the grid if none breaks."""
    best: float
    """With the lowest mean final loss among those without a crash."""
    breaks: bool
    """Whether plain runs crash at High on most seeds."""


@dataclass(frozen=True)
class Result:
    """One row: its runs by seed."""

    row: Row
    lr: float
    runs: dict[int, Record]

    @property
    def losses(self) -> list[float]:
        """Final held-out losses that are finite, of crashed runs too."""
        return [r["final_loss"] for r in self.runs.values() if r["final_loss"] is not None]

    def metric_text(self, name: str) -> str:
        """Mean ± standard deviation of another metric; records of earlier versions have none."""
        values = [run["metrics"][name] for run in self.runs.values() if name in run.get("metrics", {})]
        return mean_text(values) or "-"

    @property
    def outcomes(self) -> Runs:
        """Final loss and crash by seed."""
        found = self.runs.items()
        return {s: (math.nan if r["final_loss"] is None else r["final_loss"], r["crashed"]) for s, r in found}

    @property
    def num_crashed(self) -> int:
        """Runs that crashed."""
        return sum(record["crashed"] for record in self.runs.values())

    @property
    def loss_text(self) -> str:
        """Mean ± standard deviation, and a mark for crashes."""
        if not self.runs:
            return "-"
        parts = [mean_text(self.losses)] if self.losses else []
        if self.num_crashed:
            parts.append(f"† {self.num_crashed}/{len(self.runs)} crashed")
        return " ".join(parts)


@dataclass(frozen=True)
class Case:
    """One task, optimizer and length."""

    facts: dict[str, Any]
    seeds: list[int]
    chosen: Chosen | None
    """None while the grid has nothing to show."""
    grid: dict[float, dict[int, Record]]
    results: list[Result]

    def result(self, key: str, at: str) -> Result:
        """The row of this key at this learning rate; without runs where it was left out."""
        found = [r for r in self.results if (r.row.key, r.row.at) == (key, at)]
        rows = [row for row in ROWS if (row.key, row.at) == (key, at)]
        return found[0] if found else Result(rows[0], math.nan, {})

    @property
    def title(self) -> str:
        """In one line."""
        return case_title(self.facts, len(self.seeds), *(len(result.runs) for result in self.results))


@dataclass(frozen=True)
class Ablation:
    """The runs, and what follows from them."""

    records: list[Record]
    is_complete: bool = True

    @property
    def cases(self) -> list[Case]:
        """One per task, optimizer and length, in the order of the records."""
        return [_case(records) for records in by_case(self.records)]


def best_of(grid: Mapping[float, Mapping[int, Record]]) -> tuple[float, float]:
    """The learning rate with the lowest mean final loss among those without a crash, and that loss."""
    means = {
        lr: statistics.fmean(r["final_loss"] for r in runs.values())
        for lr, runs in grid.items()
        if not any(r["crashed"] for r in runs.values())
    }
    best = min(means, key=lambda lr: means[lr], default=math.inf)
    return best, means.get(best, math.inf)


def judged(record: Record, best_lr: float, best_loss: float) -> Record:
    """The record, crashed too where a learning rate above the best one has left a network that is dead."""
    if record["crashed"] or record["lr"] <= best_lr:
        return record
    untrained = record["untrained_loss"]
    if not is_lost(record["final_loss"], untrained_loss=untrained, best_loss=best_loss):
        return record
    return record | {"crashed": True, "crash": "a gain far below the best's", "has_spike": True}


def choose(grid: Mapping[float, Mapping[int, Record]]) -> Chosen | None:
    """Low, High and the best of a grid of plain runs; None if no learning rate is safe."""
    best, best_loss = best_of(grid)
    runs = {lr: [judged(r, best, best_loss) for r in by_seed.values()] for lr, by_seed in grid.items()}
    safe = choose_safe({lr: [r["has_spike"] for r in found] for lr, found in runs.items()})
    if safe is None:
        return None
    high = choose_high({lr: [r["crashed"] for r in found] for lr, found in runs.items()})
    return Chosen(
        low=float(f"{safe / LOW_FACTOR:.4g}"),
        high=max(grid) if high is None else high,
        best=best,
        breaks=high is not None,
    )


def rows_to_run(chosen: Chosen) -> list[tuple[Row, float]]:
    """All rows with their learning rates, in the order of the table; those at High only where one breaks."""
    at = {"low": chosen.low, "high": chosen.high, "best": chosen.best}
    return [(row, at[row.at]) for row in ROWS if chosen.breaks or row.at != "high"]


def _case(records: Sequence[Record]) -> Case:
    facts = {name: records[0][name] for name in CASE}
    points: dict[float, dict[int, Record]] = {}
    for record in records:
        if record["row"] == GRID:
            points.setdefault(record["lr"], {})[record["seed"]] = record
    # Seeds that most points have: the best one may have more, and one that is under way fewer.
    counts = Counter(seed for runs in points.values() for seed in runs)
    seeds = {seed for seed, count in counts.items() if 2 * count > len(points)}
    grid = {lr: {s: runs[s] for s in seeds} for lr, runs in sorted(points.items()) if seeds <= runs.keys()}
    chosen = choose(grid)
    if chosen is None:
        return Case(facts, [], None, grid, [])
    best = best_of(grid)
    results = []
    for row, lr in rows_to_run(chosen):
        settings = _as_text(row.settings(facts["steps"]))
        runs = {
            r["seed"]: judged(r, *best)
            for r in records
            if r["row"] == row.key
            and _as_text(r["settings"]) == settings
            and math.isclose(r["lr"], lr, rel_tol=1e-6)
        }
        results.append(Result(row, lr, dict(sorted(runs.items()))))
    return Case(facts, sorted(grid[chosen.best]), chosen, grid, results)


def _as_text(settings: Mapping[str, Any]) -> str:
    """Settings are equal if a ledger writes them alike: a tuple becomes a list there."""
    return json.dumps(settings, sort_keys=True)

"""Tables of the zoo: every method against the strict baseline, dev and held out apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from research.compare.ledger import Record
from research.markdown import table_line
from research.zoo.catalogue import names, problem_of
from research.zoo.experiment import SWEEP, loss_of, sweep_losses
from research.zoo.sweep import WARMUPS, best_point, lr_at

__all__ = ["Baseline", "baseline_of", "ratios", "table"]

NEAR, FAR = (0.1, 1.0, 10.0), (0.01, 100.0)
"""Starts that users have, and starts that are far off."""


@dataclass(frozen=True)
class Baseline:
    """The best of the sweep over learning rates and warm-ups."""

    lr: float
    warmup: float
    by_seed: dict[int, float]
    valley: dict[float, float]
    """By warm-up: the highest learning rate within 1 % of that warm-up's best, over the lowest."""


def baseline_of(records: Sequence[Record], problem: str, seeds: Sequence[int]) -> Baseline | None:
    """The strict baseline of a problem; None if its sweep is not there."""
    losses = sweep_losses(records, problem, seeds)
    if not losses or not math.isfinite(min(losses.values())):
        return None
    warmup, place = best_point(losses)
    by_seed = {
        record["seed"]: loss_of(record)
        for record in records
        if (record["problem"], record["method"], record["warmup"], record["lr"])
        == (problem, SWEEP, warmup, lr_at(place))
    }
    valley = {}
    for w in WARMUPS:
        here = {p: loss for (other, p), loss in losses.items() if other == w}
        near = [p for p, loss in here.items() if loss <= 1.01 * min(here.values())]
        valley[w] = lr_at(max(near)) / lr_at(min(near)) if near else math.nan
    return Baseline(lr_at(place), warmup, by_seed, valley)


def ratios(
    records: Sequence[Record], problem: str, method: str, start: float | None, seeds: Sequence[int]
) -> list[float]:
    """Held-out loss over the baseline's, seed by seed; infinite where a run failed."""
    baseline = baseline_of(records, problem, seeds)
    if baseline is None:
        return []
    found = {
        record["seed"]: loss_of(record) / baseline.by_seed[record["seed"]]
        for record in records
        if (record["problem"], record["method"], record["start"]) == (problem, method, start)
        and record["seed"] in baseline.by_seed
    }
    return [found[seed] for seed in seeds if seed in found]


def table(records: Sequence[Record], *, seeds: Sequence[int], ours: str = "hdet_find") -> str:
    """Markdown: an overview, then one table of methods and one of problems for each split."""
    parts = [_overview(records, seeds), _by_replicas(records, seeds, ours)]
    for split in ("dev", "held out"):
        there = [name for name in names(split) if baseline_of(records, name, seeds) is not None]
        if there:
            parts += [f"## {split.capitalize()}", _methods(records, there, seeds)]
            parts += [f"### {ours}, problem by problem", _problems(records, there, seeds, ours)]
            parts += [_harm(records, there, seeds, ours), _accuracy(records, there, seeds, ours)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _accuracy(records: Sequence[Record], there: Sequence[str], seeds: Sequence[int], method: str) -> str:
    """How far the learning rates that were found are from the baseline's."""
    lines = []
    for are_many, who in ((True, "With 8 replicas"), (False, "With 1 or 2")):
        errors = []
        for problem in there:
            baseline = baseline_of(records, problem, seeds)
            if baseline is not None and (problem_of(problem).num_replicas > 2) == are_many:
                errors += [
                    abs(math.log(record["found_lr"] / baseline.lr))
                    for record in records
                    if (record["problem"], record["method"]) == (problem, method) and record["found_lr"]
                ]
        if errors:
            shares = [sum(error <= math.log(f) for error in errors) / len(errors) for f in (2, 3, 10)]
            lines.append(
                f"{who} the learning rate is within a factor of 2 of the baseline's in {shares[0]:.0%} of "
                f"{len(errors)} runs from all starts, of 3 in {shares[1]:.0%}, of 10 in {shares[2]:.0%}."
            )
    covered = [
        record["likely"][0] <= baseline.lr <= record["likely"][1]
        for problem in there
        if (baseline := baseline_of(records, problem, seeds)) is not None
        for record in records
        if (record["problem"], record["method"]) == (problem, method) and record.get("likely")
    ]
    if covered:
        share = sum(covered) / len(covered)
        lines.append(
            f"The range that it gives holds the baseline's learning rate in {share:.0%} of the runs."
        )
    return "\n".join(lines)


def _overview(records: Sequence[Record], seeds: Sequence[int]) -> str:
    """Every method on both splits, from the near starts."""
    head = ["method", "dev: median", "90th", "worst", "held out: median", "90th", "worst"]
    lines = [table_line(head), table_line(["---", *["---:"] * (len(head) - 1)])]
    rows = []
    for method in dict.fromkeys(record["method"] for record in records if record["method"] != SWEEP):
        dev, held_out = (
            _spread(_cells(records, names(split), method, NEAR, seeds)) for split in ("dev", "held out")
        )
        rows.append(([method, *(_shown(value) for value in (*dev, *held_out))], dev[0]))
    return "\n".join([*lines, *(table_line(row) for row, _ in sorted(rows, key=lambda row: row[1]))])


def _by_replicas(records: Sequence[Record], seeds: Sequence[int], method: str) -> str:
    """How a method does on the problems of each number of replicas, of both splits, from the near starts."""
    lines = []
    every = [name for split in ("dev", "held out") for name in names(split)]
    for count in sorted({problem_of(name).num_replicas for name in every}):
        cells = _cells(
            records, [name for name in every if problem_of(name).num_replicas == count], method, NEAR, seeds
        )
        if cells:
            middle, _, worst = _spread(cells)
            lines.append(table_line([f"{count}", f"{len(cells)}", _shown(middle), _shown(worst)]))
    head = [table_line(["replicas", "cases", "median", "worst"]), table_line(["---:"] * 4)]
    return "\n".join([*head, *lines]) if lines else ""


def _spread(cells: Sequence[float]) -> tuple[float, float, float]:
    """Median, 90th percentile and worst."""
    if not cells:
        return math.nan, math.nan, math.nan
    ordered = sorted(cells)
    return statistics.median(ordered), ordered[math.ceil(0.9 * len(ordered)) - 1], ordered[-1]


def _harm(records: Sequence[Record], there: Sequence[str], seeds: Sequence[int], method: str) -> str:
    """How often a method ends worse than plain training from the same start."""
    harms = []
    for problem in there:
        for start in (*FAR, *NEAR):
            ours = ratios(records, problem, method, start, seeds)
            plain = ratios(records, problem, "plain_tail", start, seeds)
            if ours and plain:
                lost = math.inf in plain  # nothing is worse than that
                harm = 0.0 if lost else statistics.fmean(ours) / statistics.fmean(plain)
                harms.append((harm, problem, start))
    if not harms:
        return ""
    bad = sorted((harm for harm in harms if harm[0] > 1.01), reverse=True)
    named = ", ".join(f"{problem} x{start:g} ({harm:.3f})" for harm, problem, start in bad)
    return (
        f"Over plain training with the tail from the same start: {len(bad)} of {len(harms)} cases are more "
        f"than 1 % worse{': ' + named if bad else ''}."
    )


def _cells(
    records: Sequence[Record],
    there: Sequence[str],
    method: str,
    starts: Sequence[float],
    seeds: Sequence[int],
) -> list[float]:
    """One number for each problem and start: the mean ratio over seeds."""
    cells = []
    for problem in there:
        for start in starts:
            found = ratios(records, problem, method, start, seeds) or ratios(
                records, problem, method, None, seeds
            )
            if found:
                cells.append(statistics.fmean(found))
    return cells


def _methods(records: Sequence[Record], there: Sequence[str], seeds: Sequence[int]) -> str:
    head = ["method", "median", "90th", "worst", "far: median", "far: worst", "cases"]
    lines = [table_line(head), table_line(["---", *["---:"] * (len(head) - 1)])]
    methods = dict.fromkeys(record["method"] for record in records if record["method"] != SWEEP)
    rows = []
    for method in methods:
        near = _cells(records, there, method, NEAR, seeds)
        far_median, _, far_worst = _spread(_cells(records, there, method, FAR, seeds))
        if near:
            rows.append((method, (*_spread(near), far_median, far_worst), len(near)))
    for method, values, count in sorted(rows, key=lambda row: row[1][0]):
        lines.append(table_line([method, *(_shown(value) for value in values), str(count)]))
    return "\n".join(lines)


def _problems(records: Sequence[Record], there: Sequence[str], seeds: Sequence[int], method: str) -> str:
    starts = (FAR[0], *NEAR, FAR[1])
    head = ["problem", "replicas", "best LR", "valley", *(f"x{start:g}" for start in starts), "error"]
    lines = [table_line(head), table_line(["---", *["---:"] * (len(head) - 1)])]
    for problem in there:
        baseline = baseline_of(records, problem, seeds)
        assert baseline is not None
        cells = [ratios(records, problem, method, start, seeds) for start in starts]
        errors = [statistics.stdev(c) / math.sqrt(len(c)) for c in cells if len(c) > 1 and max(c) < math.inf]
        lines.append(
            table_line(
                [
                    problem,
                    str(problem_of(problem).num_replicas),
                    f"{baseline.lr:g}, {100 * baseline.warmup:g} %",
                    " / ".join(f"{width:.1f}" for width in baseline.valley.values()),
                    *(_shown(statistics.fmean(cell)) if cell else "-" for cell in cells),
                    f"{100 * statistics.fmean(errors):.2f} %" if errors else "-",
                ]
            )
        )
    return "\n".join(lines)


def _shown(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "failed" if value == math.inf else f"{value:.3f}" if value < 10 else f"{value:.1f}"

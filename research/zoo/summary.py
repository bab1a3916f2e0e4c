"""Tables of the zoo: every method against the strict baseline, dev and held out apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hdet.search.decisions import likely_range
from research.compare.ledger import Record
from research.markdown import table_line
from research.zoo.catalogue import names, problem_of
from research.zoo.experiment import AGAIN, SWEEP, loss_of, sweep_losses
from research.zoo.problem import Split
from research.zoo.sweep import WARMUPS, best_point, lr_at

__all__ = ["Baseline", "baseline_of", "ratios", "shown", "spread", "table"]

NEAR, FAR = (0.1, 1.0, 10.0), (0.01, 100.0)
"""Starts that users have, and starts that are far off."""
ON_TOP, STEERED, INSIDE, PLAIN = "hdet_find_on_top", "hdet_steered_on_top", "hdet_find", "plain_tail"
_SPLITS: tuple[Split, ...] = ("dev", "held out")


@dataclass(frozen=True)
class Baseline:
    """The best of the sweep over learning rates and warm-ups, run again on fresh seeds."""

    lr: float
    warmup: float
    loss: float
    """Mean over the fresh seeds, or over those of the sweep where there are none."""
    error: float
    """Standard error of the mean, relative to it."""
    valley: dict[float, float]
    """By warm-up: the highest learning rate within 1 % of that warm-up's best, over the lowest."""


def baseline_of(records: Sequence[Record], problem: str, seeds: Sequence[int]) -> Baseline | None:
    """The strict baseline of a problem; None if its sweep is not there."""
    losses = sweep_losses(records, problem, seeds)
    if not losses or not math.isfinite(min(losses.values())):
        return None
    warmup, place = best_point(losses)
    chosen = (problem, warmup, lr_at(place))
    runs = {
        method: [
            loss_of(record)
            for record in records
            if (record["problem"], record["warmup"], record["lr"]) == chosen and record["method"] == method
        ]
        for method in (AGAIN, SWEEP)
    }
    again = runs[AGAIN] or runs[SWEEP]
    loss = statistics.fmean(again)
    error = statistics.stdev(again) / math.sqrt(len(again)) / loss if len(again) > 1 else math.nan
    valley = {}
    for w in WARMUPS:
        here = {p: loss for (other, p), loss in losses.items() if other == w}
        near = [p for p, loss in here.items() if loss <= 1.01 * min(here.values())]
        valley[w] = lr_at(max(near)) / lr_at(min(near)) if near else math.nan
    return Baseline(lr_at(place), warmup, loss, error, valley)


def ratios(
    records: Sequence[Record], problem: str, method: str, start: float | None, seeds: Sequence[int]
) -> dict[int, float]:
    """Held-out loss over the baseline's, by seed; infinite where a run failed."""
    baseline = baseline_of(records, problem, seeds)
    if baseline is None:
        return {}
    return {
        record["seed"]: loss_of(record) / baseline.loss
        for record in records
        if (record["problem"], record["method"], record["start"]) == (problem, method, start)
    }


def table(records: Sequence[Record], *, seeds: Sequence[int]) -> str:
    """Markdown: how good the number is, the comparison at equal budget, then both splits in detail."""
    parts = [_number(records, seeds), _overview(records, seeds)]
    for split in _SPLITS:
        there = [name for name in names(split) if baseline_of(records, name, seeds) is not None]
        if there:
            parts += [f"## {split.capitalize()}", _problems(records, there, seeds)]
            parts += [_harm(records, there, seeds, ON_TOP, (*FAR, *NEAR)), _accuracy(records, there, seeds)]
            parts += [_harm(records, there, seeds, STEERED, NEAR)]
            parts += ["### Equal budget", _methods(records, there, seeds)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _number(records: Sequence[Record], seeds: Sequence[int]) -> str:
    """How good the learning rate is that was found: all steps of the run, and the search on top of them."""
    head = ["the run's learning rate", "dev: median", "90th", "worst", "held out: median", "90th", "worst"]
    rows = [table_line(head), table_line(["---", *["---:"] * 6])]
    for label, method, starts in (
        ("found, from guesses 10 times off or right", ON_TOP, NEAR),
        ("found and steered, from the same guesses", STEERED, NEAR),
        ("found, from guesses 100 times off", ON_TOP, FAR),
        ("the guess, 10 times off or right", PLAIN, NEAR),
        ("the guess, 100 times off", PLAIN, FAR),
    ):
        cells = [spread(_cells(records, names(split), method, starts, seeds)) for split in _SPLITS]
        rows.append(table_line([label, *(shown(value) for three in cells for value in three)]))
    taken = [
        record["search_steps"] / problem_of(record["problem"]).num_steps
        for record in records
        if record["method"] == ON_TOP and record["start"] in NEAR
    ]
    if not taken:
        return ""
    more = (
        f"The search took {statistics.median(taken):.0%} more steps in the median, {max(taken):.0%} at most."
    )
    return "\n".join([*rows, "", more])


def _accuracy(records: Sequence[Record], there: Sequence[str], seeds: Sequence[int]) -> str:
    """How far the learning rates that were found are from the baseline's."""
    errors, covered = [], []
    for problem in there:
        baseline = baseline_of(records, problem, seeds)
        assert baseline is not None
        for record in records:
            if (record["problem"], record["method"]) == (problem, ON_TOP) and record["found_lr"]:
                errors.append(abs(math.log(record["found_lr"] / baseline.lr)))
                low, high = likely_range(record["found_lr"])
                covered.append(low <= baseline.lr <= high)
    if not errors:
        return ""
    shares = [sum(error <= math.log(f) for error in errors) / len(errors) for f in (2, 3, 10)]
    return (
        f"The learning rate is within a factor of 2 of the baseline's in {shares[0]:.0%} of {len(errors)} "
        f"runs from all starts, of 3 in {shares[1]:.0%}, of 10 in {shares[2]:.0%}. The range that is given "
        f"with it holds the baseline's in {sum(covered) / len(covered):.0%}."
    )


def _overview(records: Sequence[Record], seeds: Sequence[int]) -> str:
    """Every method on both splits at equal budget, from the near starts."""
    head = ["method", "dev: median", "90th", "worst", "held out: median", "90th", "worst"]
    lines = [table_line(head), table_line(["---", *["---:"] * (len(head) - 1)])]
    rows = []
    for method in _methods_of(records):
        dev, held_out = (spread(_cells(records, names(split), method, NEAR, seeds)) for split in _SPLITS)
        rows.append(([method, *(shown(value) for value in (*dev, *held_out))], dev[0]))
    return "\n".join([*lines, *(table_line(row) for row, _ in sorted(rows, key=lambda row: row[1]))])


def _methods_of(records: Sequence[Record]) -> list[str]:
    """The methods that have the same number of steps."""
    kinds = dict.fromkeys(record["method"] for record in records)
    return [method for method in kinds if method not in (SWEEP, AGAIN, ON_TOP, STEERED)]


def spread(cells: Sequence[float]) -> tuple[float, float, float]:
    """Median, 90th percentile and worst."""
    if not cells:
        return math.nan, math.nan, math.nan
    ordered = sorted(cells)
    return statistics.median(ordered), ordered[math.ceil(0.9 * len(ordered)) - 1], ordered[-1]


def _harm(
    records: Sequence[Record],
    there: Sequence[str],
    seeds: Sequence[int],
    method: str,
    starts: Sequence[float],
) -> str:
    """How often a run with the learning rate that was found ends worse than one with the guess."""
    harms, rights = [], []
    for problem in there:
        for start in starts:
            ours = ratios(records, problem, method, start, seeds)
            plain = ratios(records, problem, PLAIN, start, seeds)
            both = ours.keys() & plain.keys()
            if both:
                lost = any(plain[seed] == math.inf for seed in both)  # nothing is worse than that
                pairs = [(ours[seed], plain[seed]) for seed in both]
                harm = 0.0 if lost else math.fsum(a for a, _ in pairs) / math.fsum(b for _, b in pairs)
                harms.append((harm, problem, start))
                rights += [harm] * (start == 1)
    if not harms:
        return ""
    bad = sorted((harm for harm in harms if harm[0] > 1.01), reverse=True)
    named = ", ".join(f"{problem} x{start:g} ({harm:.3f})" for harm, problem, start in bad)
    what = "search on top" + ", with the thermostat" * (method == STEERED)
    return (
        f"Over plain training with the tail from the same start, {what}: {len(bad)} of {len(harms)} "
        f"cases are more than 1 % worse{': ' + named if bad else ''}. With a right guess these are "
        f"{sum(harm > 1.01 for harm in rights)} of {len(rights)}."
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
                cells.append(statistics.fmean(found.values()))
    return cells


def _methods(records: Sequence[Record], there: Sequence[str], seeds: Sequence[int]) -> str:
    head = ["method", "median", "90th", "worst", "far: median", "far: worst", "cases"]
    lines = [table_line(head), table_line(["---", *["---:"] * (len(head) - 1)])]
    rows = []
    for method in _methods_of(records):
        near = _cells(records, there, method, NEAR, seeds)
        far_median, _, far_worst = spread(_cells(records, there, method, FAR, seeds))
        if near:
            rows.append((method, (*spread(near), far_median, far_worst), len(near)))
    for method, values, count in sorted(rows, key=lambda row: row[1][0]):
        lines.append(table_line([method, *(shown(value) for value in values), str(count)]))
    return "\n".join(lines)


def _problems(records: Sequence[Record], there: Sequence[str], seeds: Sequence[int]) -> str:
    """The learning rate that was found, problem by problem, search on top."""
    starts = (FAR[0], *NEAR, FAR[1])
    head = ["problem", "replicas", "best LR", "valley", *(f"x{start:g}" for start in starts), "error"]
    lines = [table_line(head), table_line(["---", *["---:"] * (len(head) - 1)])]
    for problem in there:
        baseline = baseline_of(records, problem, seeds)
        assert baseline is not None
        cells = [list(ratios(records, problem, ON_TOP, start, seeds).values()) for start in starts]
        errors = [statistics.stdev(c) / math.sqrt(len(c)) for c in cells if len(c) > 1 and max(c) < math.inf]
        error = math.hypot(statistics.fmean(errors), baseline.error) if errors else math.nan
        lines.append(
            table_line(
                [
                    problem,
                    str(problem_of(problem).num_replicas),
                    f"{baseline.lr:g}, {100 * baseline.warmup:g} %",
                    " / ".join(f"{width:.1f}" for width in baseline.valley.values()),
                    *(shown(statistics.fmean(cell)) if cell else "-" for cell in cells),
                    "-" if math.isnan(error) else f"{100 * error:.1f} %",
                ]
            )
        )
    return "\n".join(lines)


def shown(value: float) -> str:
    """Write a ratio of losses."""
    if math.isnan(value):
        return "-"
    if value == math.inf:
        return "failed"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 1000 else "over 1000"

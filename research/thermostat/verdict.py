"""Tables of the loop: runs with the thermostat against plain ones of the same start and seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from research.compare.ledger import Record
from research.markdown import table_line
from research.thermostat.experiment import STARTS, loss_of
from research.thermostat.problems import GRID
from research.zoo.summary import NEAR

__all__ = ["loop_tables", "over_best"]

_LOST = 1000.0
"""Loss over the best from which on the number says nothing."""
_ERRORS = 2.0
"""Standard errors by which a case must be above plain training to count as harm."""


def _random_loop(records: Sequence[Record], steered: str) -> str:
    """The same for the random problems, whose starts are two points of the sweep below the best and above."""
    cases: list[Case] = []
    for problem in dict.fromkeys(r["problem"] for r in records if r["problem"].startswith("random ")):
        runs = {(r["method"], r["start"]): loss_of(r) for r in records if r["problem"] == problem}
        plain = {start: loss for (method, start), loss in runs.items() if method == "plain"}
        best = min(plain, key=plain.__getitem__)
        for power, start in ((-2, 0.2), (0, 1.0), (2, 5.0)):
            there = float(f"{best * GRID**power:.6g}")
            if (steered, there) in runs and there in plain:
                lowest = plain[best]
                cases.append((problem, start, [plain[there] / lowest], [runs[steered, there] / lowest]))
    return f"**{steered}, random problems**\n\n{_summary(cases)}" if cases else ""


def over_best(records: Sequence[Record], problem: str, method: str, start: float) -> dict[int, float]:
    """Loss over that of the plain run at the best learning rate of the same seed, by seed."""
    runs = {(r["method"], r["start"], r["seed"]): r for r in records if r["problem"] == problem}
    return {
        seed: loss_of(run) / loss_of(runs["plain", 1.0, seed])
        for (m, s, seed), run in runs.items()
        if (m, s) == (method, start) and ("plain", 1.0, seed) in runs
    }


def loop_tables(records: Sequence[Record]) -> str:
    """The thermostat alone and after the search, as Markdown; nothing if it was not run."""
    methods = sorted({r["method"] for r in records} - {"plain", "found"})
    parts = [
        _compared(records, "after find_lr", "found", method, NEAR)
        if method.startswith("found")
        else _compared(records, "alone", "plain", method, STARTS)
        for method in methods
    ]
    parts += [_random_loop(records, method) for method in methods]
    later = [r for r in records if r["seed"]]  # constants were chosen on the first
    for steered, plain, starts in (("thermostat", "plain", STARTS), ("found, thermostat", "found", NEAR)):
        if cases := _cases(later, plain, steered, starts):
            parts.append(f"**{steered}, without seed 0**\n\n{_summary(cases)}")
    return "\n\n".join(part for part in parts if part)


Case = tuple[str, float, list[float], list[float]]
"""Problem, start, and the ratios of plain and of steered runs of the same seeds."""


def _cases(records: Sequence[Record], plain: str, steered: str, starts: Sequence[float]) -> list[Case]:
    cases = []
    problems = [r["problem"] for r in records if r["method"] == steered]
    for problem in dict.fromkeys(name for name in problems if not name.startswith("random ")):
        for start in starts:
            before, after = (over_best(records, problem, method, start) for method in (plain, steered))
            seeds = sorted(before.keys() & after.keys())
            if seeds:
                cases.append((problem, start, [before[s] for s in seeds], [after[s] for s in seeds]))
    return cases


def _compared(
    records: Sequence[Record], title: str, plain: str, steered: str, starts: Sequence[float]
) -> str:
    cases = _cases(records, plain, steered, starts)
    if not cases:
        return ""
    head = ["problem", *(f"x{start:g}" for start in starts)]
    lines = [table_line(head), table_line(["---", *["---:"] * len(starts)])]
    for problem in dict.fromkeys(case[0] for case in cases):
        cells = [_cell(records, case, steered) for case in cases if case[0] == problem]
        lines.append(table_line([problem, *cells, *["-"] * (len(starts) - len(cells))]))
    return "\n".join([f"**{steered}, {title}**", "", *lines, "", _summary(cases)])


def _cell(records: Sequence[Record], case: Case, steered: str) -> str:
    """Plain, steered and the factor that it came to."""
    problem, start, before, after = case
    factors = [
        math.log(r["factor"])
        for r in records
        if (r["problem"], r["method"], r["start"]) == (problem, steered, start)
    ]
    return f"{_mean(before)} {_mean(after)} ({math.exp(statistics.fmean(factors)):.2f})"


def _mean(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    if not mean < _LOST:
        return "failed" if not math.isfinite(mean) else f"> {_LOST:g}"
    return f"{mean:.3f}" if mean < 10 else f"{mean:.1f}"


def _summary(cases: Sequence[Case]) -> str:
    """Medians, tails and the cases that end above plain."""
    lines = [
        table_line(
            ["over the best", "cases", "plain: median", "90th", "worst", "steered: median", "90th", "worst"]
        ),
        table_line(["---", *["---:"] * 7]),
    ]
    starts = sorted({case[1] for case in cases})
    rows = [("all starts", cases), ("without x1", [case for case in cases if case[1] != 1])]
    rows += [(f"x{start:g}", [case for case in cases if case[1] == start]) for start in starts]
    for label, group in rows:
        shown = [value for k in (2, 3) for value in _spread([statistics.fmean(case[k]) for case in group])]
        lines.append(table_line([label, str(len(group)), *shown]))
    harms = [
        f"{problem} x{start:g} ({statistics.fmean(rises):.3f}, {len(rises)} seeds)"
        for problem, start, before, after in cases
        if is_harm(rises := [b / a if math.isfinite(a) else 0.0 for a, b in zip(before, after, strict=True)])
    ]
    words = ", ".join(harms) or "none"
    return "\n".join([*lines, "", f"Above plain by more than 1 % and two standard errors: {words}."])


def is_harm(rises: Sequence[float]) -> bool:
    """Tell if the mean of steered over plain is above 1 by more than 1 % and two standard errors.

    >>> is_harm([1.03, 1.031]), is_harm([0.99, 1.07]), is_harm([1.02])
    (True, False, True)
    """
    mean = statistics.fmean(rises)
    error = statistics.stdev(rises) / math.sqrt(len(rises)) if len(rises) > 1 else 0.0
    return not math.isfinite(mean) or (mean > 1.01 and mean - 1 > _ERRORS * error)


def _spread(values: Sequence[float]) -> list[str]:
    ordered = sorted(values)
    ends = statistics.median(ordered), ordered[math.ceil(0.9 * len(ordered)) - 1], ordered[-1]
    return [_mean([end]) for end in ends]

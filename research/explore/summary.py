"""Tables of the study, from its records."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from research.compare.ledger import Record
from research.explore.experiment import loss_of
from research.explore.problems import PROBLEMS, names
from research.markdown import table_line
from research.zoo.problem import Split

__all__ = ["ratios", "tables"]

_SPLITS: tuple[Split, ...] = ("dev", "held out")


def _runs(records: Sequence[Record], name: str, method: str, start: str | None) -> dict[int, Record]:
    """The runs of a problem by seed."""
    return {
        r["seed"]: r
        for r in records
        if (r["problem"], r["method"]) == (name, method) and start in (None, r["start"])
    }


def ratios(
    records: Sequence[Record],
    name: str,
    over: tuple[str, str],
    under: tuple[str, str],
    of: Callable[[Record], float | None] = loss_of,
) -> list[float]:
    """One run over another of the same seed, for every seed that has both."""
    above, below = _runs(records, name, *over), _runs(records, name, *under)
    pairs = [(of(above[seed]), of(below[seed])) for seed in sorted(above.keys() & below.keys())]
    return [a / b for a, b in pairs if a is not None and b]


_ROWS: tuple[tuple[str, tuple[str, str], tuple[str, str]], ...] = (
    ("explored from the default, over the default", ("explore", "default"), ("fixed", "default")),
    ("explored from the default, over the best of the sweep", ("explore", "default"), ("fixed", "best")),
    ("explored from the best, over the best", ("explore", "best"), ("fixed", "best")),
    ("the default, over the best", ("fixed", "default"), ("fixed", "best")),
    ("5 / (LR x steps), over the best", ("fixed", "auto"), ("fixed", "best")),
    ("explored from 5 / (LR x steps), over the best", ("explore", "auto"), ("fixed", "best")),
    ("a tenth of the best, over the best", ("fixed", "best x0.1"), ("fixed", "best")),
    ("explored from a tenth of the best, over the best", ("explore", "best x0.1"), ("fixed", "best")),
    ("ten times the best, over the best", ("fixed", "best x10"), ("fixed", "best")),
    ("explored from ten times the best, over the best", ("explore", "best x10"), ("fixed", "best")),
    ("early stopping at the default, over the default", ("early stopping", "default"), ("fixed", "default")),
    ("probe added to training at the default, over it", ("probe added", "default"), ("fixed", "default")),
    (
        "LR a third: explored, over the default",
        ("explore", "default, lr x0.333"),
        ("fixed", "default, lr x0.333"),
    ),
    (
        "LR times three: explored, over the default",
        ("explore", "default, lr x3"),
        ("fixed", "default, lr x3"),
    ),
    (
        "LR a third: explored, over explored at the LR found",
        ("explore", "default, lr x0.333"),
        ("explore", "default"),
    ),
    (
        "LR times three: explored, over explored at the LR found",
        ("explore", "default, lr x3"),
        ("explore", "default"),
    ),
)


def tables(records: Sequence[Record]) -> str:
    """All tables, as Markdown."""
    return "\n\n".join([_overall(records), _by_problem(records)])


def _spread(values: Sequence[float]) -> list[str]:
    if not values:
        return ["-"] * 4
    ordered = sorted(values)
    ninetieth = ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))]
    shown = (statistics.median(values), ninetieth, ordered[-1])
    return [str(len(values)), *(f"{value:.3f}" for value in shown)]


def _overall(records: Sequence[Record]) -> str:
    """Each problem counts once, with the mean over its seeds."""
    head = ["held-out loss"]
    for split in _SPLITS:
        head += [f"{split}: problems", "median", "90th", "worst"]
    lines = [table_line(head), table_line(["---"] + ["---:"] * 8)]
    for label, over, under in _ROWS:
        cells = [label]
        for split in _SPLITS:
            each = [ratios(records, name, over, under) for name in names(split)]
            cells += _spread([statistics.fmean(one) for one in each if one])
        if any(cell != "-" for cell in cells[1:]):
            lines.append(table_line(cells))
    lines.append(table_line(["LR found and decay explored, over a sweep of both", *_joint(records)]))
    scaled = ["temperature-scaled loss: explored from the default, over it"]
    accuracy = ["accuracy: explored minus default, points: mean, least, most"]
    for split in _SPLITS:
        rows = (("explore", "default"), ("fixed", "default"))
        each = [ratios(records, n, *rows, of=lambda r: r["scaled_loss"]) for n in names(split)]
        scaled += _spread([statistics.fmean(one) for one in each if one])
        gains = [gain for name in names(split) if (gain := _accuracy_gain(records, name)) is not None]
        found = (statistics.fmean(gains), min(gains), max(gains)) if gains else ()
        accuracy += [str(len(gains)), *(f"{100 * gain:+.2f}" for gain in found)] if gains else ["-"] * 4
    return "\n".join([*lines, table_line(scaled), table_line(accuracy)])


def _joint(records: Sequence[Record]) -> list[str]:
    cells = []
    for split in _SPLITS:
        found = []
        for name in names(split):
            best = [loss_of(r) for r in _runs(records, name, "joint best", None).values()]
            guesses = [r for r in records if (r["problem"], r["method"]) == (name, "find and explore")]
            if best and guesses:
                found.append(statistics.fmean(loss_of(r) for r in guesses) / statistics.fmean(best))
        cells += _spread(found)
    return cells


def _accuracy_gain(records: Sequence[Record], name: str) -> float | None:
    above, below = (_runs(records, name, m, "default") for m in ("explore", "fixed"))
    gains = [
        above[s]["accuracy"] - below[s]["accuracy"]
        for s in above.keys() & below.keys()
        if above[s]["accuracy"] is not None
    ]
    return statistics.fmean(gains) if gains else None


def _by_problem(records: Sequence[Record]) -> str:
    head = ["problem", "", "LR", "default", "best fixed", "found", "explored / default", "explored / best"]
    head += ["right start", "accuracy, points"]
    lines = [table_line(head), table_line(["---", "---"] + ["---:"] * 8)]
    for name, problem in PROBLEMS.items():
        explored = _runs(records, name, "explore", "default")
        best = _runs(records, name, "fixed", "best")
        if not explored or not best:
            continue
        first = next(iter(best.values()))
        found = statistics.geometric_mean([r["found_decay"] for r in explored.values()])
        gain = _accuracy_gain(records, name)
        cells = [name, f"{problem.family}, {problem.split}", f"{first['lr']:.3g}"]
        cells += [f"{problem.default_decay:g}", f"{first['decay']:.3g}", f"{found:.3g}"]
        for _, over, under in _ROWS[:3]:
            values = ratios(records, name, over, under)
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
            cells.append(f"{statistics.fmean(values):.3f} ± {error:.3f}" if values else "-")
        lines.append(table_line([*cells, "-" if gain is None else f"{100 * gain:+.2f}"]))
    return "\n".join(lines)

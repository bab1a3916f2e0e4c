"""Tables of the study, from its records: dev and held out apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from research.compare.ledger import Record
from research.markdown import table_line
from research.recipe.arms import ARMS, EVERYTHING
from research.recipe.experiment import FAR, NEAR
from research.recipe.problems import PROBLEMS, names
from research.recipe.sweep import Best, baseline
from research.zoo.experiment import loss_of
from research.zoo.problem import Split
from research.zoo.summary import shown, spread

__all__ = ["tables"]

_SPLITS: tuple[Split, ...] = ("dev", "held out")


def tables(records: Sequence[Record]) -> str:
    """All tables, as Markdown."""
    parts = []
    for split in _SPLITS:
        best = {name: found for name in names(split) if (found := _known(records, name)) is not None}
        if best:
            parts += [f"## {split.capitalize()}", _arms(records, best), _problems(records, best)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _known(records: Sequence[Record], name: str) -> Best | None:
    """Give the baseline of a problem that has runs here."""
    return baseline(records, name) if any(r["problem"] == name for r in records) else None


def _runs(records: Iterable[Record], name: str, arm: str, start: str) -> list[Record]:
    """Give the runs of a cell; those of an arm that needs no start stand for every one."""
    start = start if ARMS[arm].uses_start else ""
    return [r for r in records if (r["problem"], r["method"], r["start"]) == (name, arm, start)]


def _cells(
    records: Sequence[Record], best: dict[str, Best], arm: str, starts: Iterable[str]
) -> dict[tuple[str, str], float]:
    """Mean over seeds of the loss over the baseline's, by problem and start."""
    runs = {(name, start): _runs(records, name, arm, start) for name in best for start in starts}
    return {
        (name, start): statistics.fmean(loss_of(r) for r in found) / best[name].loss
        for (name, start), found in runs.items()
        if found
    }


def _harms(records: Sequence[Record], best: dict[str, Best], arm: str) -> list[float]:
    """Loss over that of plain training, from a right guess, by problem."""
    ours, plain = (_cells(records, best, method, ["x1"]) for method in (arm, "guess"))
    return [ours[cell] / plain[cell] for cell in ours.keys() & plain.keys() if plain[cell] < math.inf]


def _arms(records: Sequence[Record], best: dict[str, Best]) -> str:
    head = ["arm", "problems", "median", "90th", "worst", "1e-5, 1e-1: median", "worst"]
    head += ["right guess, above 1 %", "above 5 %", "answers within 2x", "accuracy, points: median", "least"]
    lines = [table_line(head), table_line(["---", *["---:"] * (len(head) - 1)])]
    for arm in ARMS:
        near, far = (_cells(records, best, arm, starts) for starts in (NEAR, FAR))
        if not near:
            continue
        middle, _, worst = spread(list(far.values()))
        values = [*spread(list(near.values())), middle, worst]
        cells = [arm, str(len({name for name, _ in near})), *map(shown, values)]
        harms = _harms(records, best, arm)
        cells += [f"{sum(harm > limit for harm in harms)} of {len(harms)}" for limit in (1.01, 1.05)]
        lines.append(table_line([*cells, _answers(records, best, arm), *_accuracy(records, best, arm)]))
    return "\n".join(lines) if len(lines) > 2 else ""


def _answers(records: Sequence[Record], best: dict[str, Best], arm: str) -> str:
    """Share of the learning rates that a search has found that are within a factor of 2 of the sweep's."""
    found = [
        abs(math.log(r["found_lr"] / best[name].lr)) <= math.log(2)
        for name in best
        for start in (*NEAR, *FAR)
        for r in _runs(records, name, arm, start)
        if r["search_steps"] and r["found_lr"]
    ]
    return f"{sum(found) / len(found):.0%}" if found else "-"


def _accuracy(records: Sequence[Record], best: dict[str, Best], arm: str) -> list[str]:
    """Accuracy over the baseline's from near starts, by problem: median and least."""
    gains = []
    for name, found in best.items():
        runs = [r["metrics"] for start in NEAR for r in _runs(records, name, arm, start)]
        known = [metrics["accuracy"] for metrics in runs if metrics.get("accuracy") is not None]
        if known and found.accuracy is not None:
            gains.append(100 * (statistics.fmean(known) - found.accuracy))
    return [f"{statistics.median(gains):+.2f}", f"{min(gains):+.2f}"] if gains else ["-", "-"]


def _problems(records: Sequence[Record], best: dict[str, Best]) -> str:
    """The baseline of every problem, and everything from every start."""
    starts = (*NEAR, *FAR)
    head = ["problem", "", "LR", "decay", "loss", "error", "accuracy", *starts]
    lines = [table_line(head), table_line(["---", "---", *["---:"] * (len(head) - 2)])]
    for name, found in best.items():
        cells = [name, PROBLEMS[name].family if name in PROBLEMS else "the zoo's", f"{found.lr:.3g}"]
        cells += ["-" if found.decay is None else f"{found.decay:.3g}", f"{found.loss:.4g}"]
        cells += ["-" if math.isnan(found.error) else f"{100 * found.error:.1f} %"]
        cells += ["-" if found.accuracy is None else f"{100 * found.accuracy:.1f}"]
        ours = _cells(records, {name: found}, EVERYTHING, starts)
        lines.append(table_line([*cells, *(shown(ours.get((name, start), math.nan)) for start in starts)]))
    return "\n".join(lines)

"""Tables of the law, from its records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from hdet.errors import HdetError
from hdet.method.thermostat import NUM_ROUNDS, reading_of
from research.compare.ledger import Record
from research.markdown import table_line
from research.thermostat.experiment import FACTORS, best_of, loss_of
from research.thermostat.law import (
    WINDOW,
    best_lr,
    crossing,
    gain_and_progress,
    interpolated,
    log_ratio,
    rounds_of,
)
from research.thermostat.problems import RandomProblem
from research.zoo.catalogue import problem_of

__all__ = ["Case", "cases", "law_tables"]


@dataclass(frozen=True)
class Case:
    """A problem, with plain runs of one seed at several learning rates."""

    name: str
    runs: dict[float, Record]
    """By ln LR."""
    best: float
    """The best ln LR."""

    @cached_property
    def losses(self) -> dict[float, float]:
        """Held-out loss by ln LR."""
        return {x: loss_of(record) for x, record in self.runs.items()}

    def ratios(self, window: tuple[int, int] = WINDOW, **columns: str) -> dict[float, float | None]:
        """ln(E / P) by ln LR."""
        return {
            x: log_ratio(gain_and_progress(rounds_of(record, **columns), window))
            for x, record in self.runs.items()
        }

    def regret(self, at: float) -> float:
        """Loss at a ln LR over the lowest."""
        return interpolated(self.losses, at) / min(self.losses.values())

    @property
    def is_random(self) -> bool:
        """Tell if it is one of the random problems."""
        return self.name.startswith("random ")

    @cached_property
    def facts(self) -> dict[str, str]:
        """Optimizer, repetition of the data, normalisation, steps of a round."""
        steps = next(iter(self.runs.values()))["steps"]
        length = "rounds of up to 20 steps" if steps // NUM_ROUNDS <= 20 else "rounds of more than 20 steps"
        if self.is_random:
            problem = _random(self.name)
            optimizer, norm, epochs = problem.optimizer, problem.norm, problem.epochs
            kind = f"random: {problem.kind}"
        else:
            try:
                task = problem_of(self.name)
                model = task.build_model(0)
            except HdetError:  # a table needs no data, but for this
                unknown = dict.fromkeys(("optimizer", "data", "norm"), "unknown: its data is not installed")
                return {"kind": "the zoo", "rounds": length, **unknown}
            optimizer = type(task.build_optimizer(task.parameter_groups(model), 1.0)).__name__
            kinds = {type(module).__name__ for module in model.modules()}
            norm = (
                "batch"
                if any("BatchNorm" in k for k in kinds)
                else "layer"
                if "LayerNorm" in kinds
                else "none"
            )
            seen = steps * task.num_replicas * task.batch_size
            epochs = 0 if task.num_examples is None else seen / task.num_examples
            kind = "the zoo"
        repeats = "new data" if epochs < 1.5 else "2 to 9 epochs" if epochs < 10 else "10 epochs or more"
        names = {"MuonAndAdamW": "Muon"}
        return {
            "kind": kind,
            "optimizer": names.get(optimizer, optimizer),
            "data": repeats,
            "norm": f"norm: {norm}",
            "rounds": length,
        }

    @cached_property
    def signs(self) -> dict[str, str]:
        """What a run can tell of itself where E / P is .25, or at the best learning rate if it never is."""
        place = crossing(self.ratios())
        near = min(self.runs, key=lambda x: abs(x - (self.best if place is None else place)))
        rounds = rounds_of(self.runs[near])[: WINDOW[1]]
        if len(rounds) < WINDOW[1]:
            return {"E": "the run died", "P": "the run died"}
        read = reading_of(rounds)
        fall = rounds[1].mean - statistics.fmean(r.mean for r in rounds[WINDOW[0] - 1 :])
        share = read.progress / fall if fall > 0 else math.inf
        size = "below .1" if share < 0.1 else ".1 to 1" if share <= 1 else "above 1"
        is_clear = read.gain > 4 * read.gain_error
        return {
            "E": "E is above four standard errors" if is_clear else "E is below four standard errors",
            "P": f"P over the fall so far is {size}",
        }


@lru_cache(maxsize=64)
def _random(name: str) -> RandomProblem:
    return RandomProblem(int(name.split()[1]))


def cases(records: Sequence[Record], seed: int = 0) -> list[Case]:
    """All problems that have runs at five learning rates or more."""
    runs: dict[str, dict[float, Record]] = {}
    for r in records:
        if (r["method"], r["seed"]) == ("plain", seed):
            runs.setdefault(r["problem"], {})[math.log(r["lr"])] = r
    found = []
    for name, there in runs.items():
        if len(there) >= len(FACTORS):
            losses = {x: loss_of(r) for x, r in there.items()}
            is_random = name.startswith("random ")
            best = best_lr(losses) if is_random else math.log(best_of(name).lr)
            found.append(Case(name, there, best))
    return found


def law_tables(records: Sequence[Record]) -> str:
    """E / P by learning rate, and where it is .25, as Markdown."""
    found = cases(records)
    if not found:
        return ""
    return "\n\n".join([_by_factor(found), _by_kind(found), _by_source(found), _by_problem(found)])


def _quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    if len(ordered) < 2:
        only = ordered[0] if ordered else math.nan
        return only, only, only
    low, middle, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return low, middle, high


def _by_factor(found: Sequence[Case]) -> str:
    """Median and quartiles of E / P at factors on the best learning rate."""
    lines = [
        table_line(["E / P at", "problems", *(f"x{f:g}" for f in FACTORS)]),
        table_line(["---", *["---:"] * 6]),
    ]
    for label, is_random, window in (
        ("the zoo", False, WINDOW),
        ("the zoo, rounds 6 to 12", False, (6, 12)),
        ("the zoo, rounds 4 to 8", False, (4, 8)),
        ("random problems", True, WINDOW),
        ("random problems, rounds 4 to 8", True, (4, 8)),
    ):
        group = [case for case in found if case.is_random == is_random]
        cells = []
        for factor in FACTORS:
            values = []
            for case in group:
                known = {x: r for x, r in case.ratios(window).items() if r is not None}
                if known:
                    values.append(interpolated(known, case.best + math.log(factor)))
            low, middle, high = (_ratio(value) for value in _quartiles(values))
            cells.append(f"**{middle}** ({low} to {high})")
        lines.append(table_line([label, str(len(group)), *cells]))
    return "\n".join(lines)


def _loss(ratio: float) -> str:
    return "failed" if ratio == math.inf else f"{ratio:.3f}"


def _ratio(log_ratio: float) -> str:
    if log_ratio > 4:
        return "large"
    return f"{math.exp(log_ratio):.2f}" if log_ratio > -4 else "0"


def _errors(group: Sequence[Case]) -> list[float | None]:
    """ln(LR at which E / P = .25, over the best); None without such a place."""
    places = [(crossing(case.ratios()), case.best) for case in group]
    return [None if place is None else place - best for place, best in places]


def _by_kind(found: Sequence[Case]) -> str:
    """How far the learning rate of E / P = .25 is from the best, by what kind of problem it is."""
    head = ["ln(LR at .25 / best)", "problems", "no such LR", "median", "quartiles", "within 2x", "within 3x"]
    head.append("loss there / lowest: median, 90th")
    lines = [table_line(head), table_line(["---", *["---:"] * (len(head) - 1)])]
    groups: list[tuple[str, Callable[[Case], bool]]] = [
        ("all", lambda case: True),
        ("random problems", lambda case: case.is_random),
    ]
    for key in ("kind", "optimizer", "data", "norm", "rounds", "E", "P"):
        groups += [
            (value, lambda case, key=key, value=value: (case.facts | case.signs)[key] == value)
            for value in sorted({(case.facts | case.signs)[key] for case in found})
        ]
    for label, belongs in groups:
        group = [case for case in found if belongs(case)]
        if not group:
            continue
        errors = _errors(group)
        known = [error for error in errors if error is not None]
        low, middle, high = _quartiles(known)
        shares = [sum(abs(e) <= math.log(f) for e in known) / len(group) for f in (2, 3)]
        regrets = sorted(c.regret(c.best + e) for c, e in zip(group, errors, strict=True) if e is not None)
        ends = (statistics.median(regrets), regrets[math.ceil(0.9 * len(regrets)) - 1]) if regrets else ()
        lines.append(
            table_line(
                [
                    label,
                    str(len(group)),
                    str(len(errors) - len(known)),
                    f"{middle:+.2f}",
                    f"{low:+.2f} to {high:+.2f}",
                    *(f"{share:.0%}" for share in shares),
                    ", ".join(f"{end:.3f}" for end in ends),
                ]
            )
        )
    return "\n".join(lines)


_SOURCES = {
    "held-out probe": {},
    "one training batch": {"end": "train_end", "mean": "train_mean"},
    "held-out probe, mean of two rounds": {"mean": "wide"},
}


def _by_source(found: Sequence[Case]) -> str:
    """Other data, other rounds: loss where E / P is a constant, the best of some, over the lowest."""
    head = ["scored on", "rounds"]
    for label in ("zoo", "random"):
        head += [f"{label}: constant", "median", "90th"]
    lines = [table_line(head), table_line(["---", *["---:"] * 7])]
    for label, columns in _SOURCES.items():
        for window in ((4, 8), (6, 12), WINDOW):
            cells = []
            for is_random in (False, True):
                group = [case for case in found if case.is_random == is_random]
                ratios = [(case, case.ratios(window, **columns)) for case in group]
                best = min((_regrets(ratios, t), t) for t in _TARGETS) if group else ((0.0, 0.0, 0.0), 0.0)
                cells += [f"{best[1]:g}", *(f"{value:.3f}" for value in best[0][1:])]
            lines.append(table_line([label, f"{window[0]} to {window[1]}", *cells]))
    return "\n".join(lines)


_TARGETS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.6)
_UNKNOWN = 1.3
"""Loss over the lowest that stands for a problem without such a learning rate."""


def _regrets(ratios: Sequence[tuple[Case, dict[float, float | None]]], target: float) -> tuple[float, ...]:
    """Mean of the logarithm, median and 90th percentile of the loss at the learning rate of a target."""
    places = [(case, crossing(values, target)) for case, values in ratios]
    ends = sorted(_UNKNOWN if place is None else min(2.0, case.regret(place)) for case, place in places)
    mean = statistics.fmean(math.log(end) for end in ends)
    return mean, statistics.median(ends), ends[math.ceil(0.9 * len(ends)) - 1]


def _by_problem(found: Sequence[Case]) -> str:
    """E / P of every problem of the zoo."""
    head = ["problem", *(f"E / P at x{f:g}" for f in FACTORS), *(f"loss x{f:g}" for f in FACTORS)]
    lines = [table_line(head), table_line(["---", *["---:"] * (len(head) - 1)])]
    for case in found:
        if not case.is_random:
            xs = sorted(case.runs)
            ratios = case.ratios()
            shown = ["-" if (r := ratios[x]) is None else _ratio(r) for x in xs]
            lowest = min(case.losses.values())
            lines.append(table_line([case.name, *shown, *(_loss(case.losses[x] / lowest) for x in xs)]))
    return "\n".join(lines)

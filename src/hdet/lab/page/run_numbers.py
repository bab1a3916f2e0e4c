"""Numbers of a run: learning rates guessed and found, and what was recorded or measured, by step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from hdet.lab.page.read_runs import Run, number
from hdet.lab.page.verdicts import explored
from hdet.records import RoundRecord
from hdet.round_record import is_learning_rate

Series = tuple[list[int], list[float]]
"""Steps, and a number at each."""


def hyperparameters(run: Run) -> list[str]:
    """Names of everything with a schedule, in their order."""
    return list(dict.fromkeys(name for record in run.records for name in (*record.base, *record.base_trace)))


def learning_rates(run: Run) -> list[str]:
    """Names of the learning rates, in their order."""
    return [name for name in hyperparameters(run) if is_learning_rate(name)]


def families(names: Iterable[str], separators: str = "./[") -> dict[str, list[str]]:
    """Names together that are equal up to a separator: parameter groups, or parts of a metric.

    >>> families(["lr.head", "lr.body", "dropout", "wd", "wd[1]"])
    {'lr': ['lr.head', 'lr.body'], 'dropout': ['dropout'], 'wd': ['wd', 'wd[1]']}
    """
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.split(f"[{re.escape(separators)}]", name, maxsplit=1)[0] or name, []).append(name)
    return found


def base_series(run: Run, name: str) -> Series:
    """The base of every step; at the syncs only where no trace was kept."""
    points = [point for record in run.records for point in _trace(record, name)]
    return _series(points or [(r.step, r.base[name]) for r in run.records if name in r.base])


def plan_series(run: Run, name: str) -> Series:
    """Give the schedule as planned, at syncs; empty if nothing was corrected."""
    tunable = re.sub(r"\[\d+\]$", "", name)  # fields of one tunable share its correction
    factors = [record.correction.get(tunable, 1.0) for record in run.records]
    if all(abs(factor - 1) < 1e-9 for factor in factors):
        return [], []
    points, is_corrected = list[tuple[int, float]](), False
    for record, factor in zip(run.records, factors, strict=True):
        points += [] if is_corrected else _trace(record, name)  # until then the base is as planned
        is_corrected = is_corrected or factor != 1
        if is_corrected and name in record.base and 0 < factor < math.inf:
            points.append((record.step, record.base[name] / factor))
    return _series(points)


def value_series(run: Run, name: str, choose: Callable[[Sequence[float]], float]) -> Series:
    """Give one value of the replicas at every step, such as the lowest; empty where they do not differ."""
    points = list[tuple[int, float]]()
    for record in run.records if name in explored(run.records) else ():
        values, trace = record.values.get(name), _trace(record, name)
        if values and trace and trace[-1][1]:
            factor = choose(values) / trace[-1][1]  # values are those of the last step
            points += [(step, base * factor) for step, base in trace]
    return _series(points)


def _series(points: Sequence[tuple[int, float]]) -> Series:
    return [step for step, _ in points], [value for _, value in points]


def _trace(record: RoundRecord, name: str) -> list[tuple[int, float]]:
    trace = record.base_trace.get(name, [])
    if len(trace) == 1 and record.num_steps > 1:
        return [(record.step - record.num_steps + 1, trace[0]), (record.step, trace[0])]
    return list(zip(range(record.step - len(trace) + 1, record.step + 1), trace, strict=True))


def asked_lr(run: Run) -> float | None:
    """The guess of the learning rate, as a peak; that of the first group where only records tell."""
    if run.search is not None:
        return run.search.asked
    stated, name = number(run.config.get("lr")), next(iter(learning_rates(run)), "")
    planned = plan_series(run, name)[1] or base_series(run, name)[1]
    return stated or max((value for value in planned if 0 < value < math.inf), default=None)


def found_lr(run: Run) -> float | None:
    """The peak learning rate that the run came to: stated, or what it began with times what was learned."""
    stated, start = (
        number(run.result.get("found_lr")),
        asked_lr(run) if run.search is None else run.search.found,
    )
    if stated is not None or start is None:
        return stated
    # The paper's form has no factor on the plan: it holds the value itself.
    last = run.records[-1].correction if run.records and "paper" not in run.controllers else {}
    logs = [math.log(x) for name, x in last.items() if is_learning_rate(name) and 0 < x < math.inf]
    return start * math.exp(math.fsum(logs) / max(1, len(logs)))


def evaluated(run: Run, name: str = "loss") -> Series:
    """The held-out loss, or a metric, wherever it was measured."""
    values = ((e.step, e.loss if name == "loss" else e.metrics.get(name)) for e in run.evaluations)
    return _series([(step, value) for step, value in values if value is not None])


def training_losses(run: Run) -> Series:
    """The mean over the replicas, for every round that has a loss."""
    points = list[tuple[int, float]]()
    for record in run.records:
        known = [loss for loss in record.losses if loss is not None and math.isfinite(loss)]
        points += [(record.step, math.fsum(loss / len(known) for loss in known))] if known else []
    return _series(points)


def main_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without the loss, and without those that are a part of another.

    >>> main_metrics({"loss": 0.3, "loss_like": 0.2, "auc_like": 0.8, "auc": 0.7})
    {'auc': 0.7}
    """
    wholes = {"loss", *metrics}
    parts = {name for name in metrics for whole in wholes if name.startswith(f"{whole}_")}
    return {name: value for name, value in metrics.items() if name not in parts | {"loss"}}

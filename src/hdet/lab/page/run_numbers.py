"""Numbers of a run: learning rates guessed and found, and what was recorded or measured, by step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from hdet.lab.page.chart import unzip
from hdet.lab.page.read_runs import Run, number
from hdet.lab.page.what_replicas_said import explored
from hdet.records import RoundRecord
from hdet.round_record import is_learning_rate


def mean(values: Sequence[float | None]) -> float | None:
    """Of the finite values; None if there is none.

    >>> mean([1.0, None, 2.0]), mean([math.inf])
    (1.5, None)
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(value / len(known) for value in known) if known else None


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


def base_series(run: Run, name: str) -> tuple[list[int], list[float]]:
    """The base of every step; at the syncs only where no trace was kept."""
    points = [point for record in run.records for point in _trace(record, name)]
    if not points:
        points = [(record.step, record.base[name]) for record in run.records if name in record.base]
    return unzip(points)


def plan_series(run: Run, name: str) -> tuple[list[int], list[float]]:
    """Give the schedule as planned; empty if nothing was corrected."""
    tunable = re.sub(r"\[\d+\]$", "", name)  # fields of one tunable share its correction
    corrections = [record.correction.get(tunable, 1.0) for record in run.records]
    if all(abs(c - 1) < 1e-9 for c in corrections):
        return [], []
    points: list[tuple[int, float]] = []
    if run.config.get("controller") == "paper" or any(record.thermostat_factors for record in run.records):
        # The first holds the base between syncs, the thermostat moves it there: the plan is known at syncs.
        for record, correction in zip(run.records, corrections, strict=True):
            points += _trace(record, name) if record is run.records[0] else []
            if name in record.base and math.isfinite(correction) and correction > 0:
                points.append((record.step, record.base[name] / correction))
    else:
        for record, in_force in zip(run.records, [1.0, *corrections], strict=False):
            points += [(step, value / in_force) for step, value in _trace(record, name) if in_force > 0]
    return unzip(points)


def fan_limits(run: Run, name: str) -> tuple[list[int], list[float], list[float]]:
    """Lowest and highest value among the replicas, at every step; empty where they do not differ."""
    steps, lows, highs = list[int](), list[float](), list[float]()
    for record in run.records if name in explored(run.records) else ():
        values, trace = record.values.get(name), _trace(record, name)
        if not values or not trace or not trace[-1][1]:
            continue
        last = trace[-1][1]  # values are those of the last step
        for step, base in trace:
            steps.append(step)
            lows.append(base * min(values) / last)
            highs.append(base * max(values) / last)
    return steps, lows, highs


def _trace(record: RoundRecord, name: str) -> list[tuple[int, float]]:
    trace = record.base_trace.get(name, [])
    first = record.step - record.num_steps + 1
    if len(trace) == 1 and record.num_steps > 1:
        return [(first, trace[0]), (record.step, trace[0])]
    return list(zip(range(record.step - len(trace) + 1, record.step + 1), trace, strict=True))


def asked_lr(run: Run) -> float | None:
    """The guess of the learning rate, as a peak; that of the first group where only records tell."""
    if run.search is not None:
        return run.search.asked
    stated = number(run.config.get("lr"))
    return _planned_peak(run, next(iter(learning_rates(run)), "")) if stated is None else stated


def found_lr(run: Run) -> float | None:
    """The peak learning rate that the run came to: stated, or what it began with times what was learned."""
    stated = number(run.result.get("found_lr"))
    if stated is not None:
        return stated
    start, factors = run.search.found if run.search is not None else asked_lr(run), corrections(run)
    if start is None or not factors:
        return start
    return start * math.exp(math.fsum(map(math.log, factors)) / len(factors))


def group_peaks(run: Run) -> list[float]:
    """The highest learning rate of every parameter group, as planned; those that are equal count once."""
    peaks = (_planned_peak(run, name) for name in learning_rates(run))
    return list({f"{peak:.3g}": peak for peak in peaks if peak is not None}.values())


def _planned_peak(run: Run, name: str) -> float | None:
    planned = plan_series(run, name)[1] or base_series(run, name)[1]
    return max((value for value in planned if 0 < value < math.inf), default=None)


def corrections(run: Run) -> list[float]:
    """Final factors on the planned learning rates, one per parameter group."""
    if not run.records or run.config.get("controller") == "paper":
        return []  # the paper's form has no factor: it holds the value itself
    last = run.records[-1].correction
    return [c for name, c in last.items() if is_learning_rate(name) and 0 < c < math.inf]


def evaluated(run: Run, name: str = "loss") -> list[tuple[int, float]]:
    """Step and value of the held-out loss, or of a metric, wherever it was measured."""
    values = ((e.step, e.loss if name == "loss" else e.metrics.get(name)) for e in run.evaluations)
    return [(step, value) for step, value in values if value is not None]


def training_losses(run: Run) -> list[tuple[int, float]]:
    """Step and mean over the replicas, for every round that has a loss."""
    means = ((record.step, mean(record.losses)) for record in run.records)
    return [(step, loss) for step, loss in means if loss is not None]


def main_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without the loss, and without those that are a part of another.

    >>> main_metrics({"loss": 0.3, "loss_like": 0.2, "auc_like": 0.8, "auc": 0.7})
    {'auc': 0.7}
    """
    wholes = {"loss", *metrics}
    parts = {name for name in metrics for whole in wholes if name.startswith(f"{whole}_")}
    return {name: value for name, value in metrics.items() if name not in parts | {"loss"}}


def are_comparable(runs: Sequence[Run]) -> bool:
    """Tell whether all runs measured the same loss on the same task."""
    return len({(str(run.config.get("task")), run.loss_unit) for run in runs}) == 1


def is_sweep(runs: Sequence[Run]) -> bool:
    """Tell whether the runs differ in nothing but their learning rate, which each took as it was given."""
    rates = {asked_lr(run) for run in runs}
    varied = ("lr", "name")
    settings = {str({key: value for key, value in run.config.items() if key not in varied}) for run in runs}
    is_plain = not any(run.search or run.compares or not run.config for run in runs)
    return len(rates) == len(runs) > 2 and None not in rates and len(settings) == 1 and is_plain


def highest_shown(losses: Sequence[float], untrained: float | None) -> float:
    """Find the end of an axis of losses: one far above that of the untrained weights flattens the others.

    >>> highest_shown([0.5, 1.0, 90.0], 2.0), highest_shown([0.5, 1.0], 2.0), highest_shown([3.0], None)
    (2.3, 1.0, 3.0)
    """
    low, high = min(losses), max(losses)
    return high if untrained is None else max(low, min(high, untrained + 0.2 * (untrained - low)))

"""Records into columns of numbers: by step, by replica, by position in the spread."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from hdet.lab.page.runs import Run
from hdet.records import RoundRecord
from hdet.round_record import is_learning_rate

Numbers = list[float | None]
_End = tuple[float, int]


class Slot(NamedTuple):
    """What was seen at one place of the spread, whichever replica stood there."""

    position: float
    """Mean position, from -1 to 1."""
    values: Numbers
    replicas: list[int | None]


class Place(NamedTuple):
    """How one place of the spread fared against the mean of its rounds."""

    factor: float
    mean: float
    error: float
    """Standard error of the mean."""
    num_rounds: int


def thin(columns: Sequence[Sequence[float | None]], max_points: int) -> list[int]:
    """Indices of the rows to keep: the ends, and from each stretch the rows of its extremes.

    >>> thin([[0, 1, 9, 1, 0, 1, -9, 1, 0, 0]], 6)
    [0, 2, 5, 6, 9]
    >>> thin([[1, 2, 3]], 6)
    [0, 1, 2]
    """
    length = max((len(column) for column in columns), default=0)
    if length <= max_points:
        return list(range(length))
    num_stretches = max(1, (max_points - 2) // 2)
    kept = {0, length - 1}
    for i in range(num_stretches):
        start, stop = i * length // num_stretches, (i + 1) * length // num_stretches
        found = [ends for column in columns if (ends := _extremes(column, start, stop))]
        kept |= {min(low for low, _ in found)[1], max(high for _, high in found)[1]} if found else {start}
    return sorted(kept)


def _extremes(column: Sequence[float | None], start: int, stop: int) -> tuple[_End, _End] | None:
    """Lowest and highest finite value of a stretch, each with its row."""
    stretch = column[start:stop]
    values = [v for v in stretch if v is not None and math.isfinite(v)]
    if not values:
        return None
    low, high = min(values), max(values)
    return (low, start + stretch.index(low)), (high, start + stretch.index(high))


def mean(values: Sequence[float | None]) -> float | None:
    """Of the finite values; None if there is none.

    >>> mean([1.0, None, 2.0]), mean([math.inf])
    (1.5, None)
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(value / len(known) for value in known) if known else None


def explored(run: Run) -> list[str]:
    """Names of the hyperparameters that differed between replicas, in their order."""
    names: dict[str, None] = {}
    for record in run.records:
        for name, factors in record.multipliers.items():
            if name not in names and len(set(factors)) > 1:
                names[name] = None
    return list(names)


def learning_rates(run: Run) -> list[str]:
    """Names of the learning rates, in their order."""
    names = dict.fromkeys(name for record in run.records for name in (*record.base, *record.base_trace))
    return [name for name in names if is_learning_rate(name)]


def families(names: Sequence[str]) -> dict[str, list[str]]:
    """Parameter groups of one hyperparameter, together.

    >>> families(["lr.head", "lr.body", "dropout", "wd", "wd[1]"])
    {'lr': ['lr.head', 'lr.body'], 'dropout': ['dropout'], 'wd': ['wd', 'wd[1]']}
    """
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.split(r"[./\[]", name, maxsplit=1)[0] or name, []).append(name)
    return found


def by_replica(records: Sequence[RoundRecord], field: str) -> list[Slot]:
    """One column per replica of ``losses``, ``probes`` or ``weights``."""
    rows: list[list[float | None]] = [getattr(record, field) for record in records]
    count = max((len(row) for row in rows), default=0)
    return [
        Slot(0.0, [row[r] if r < len(row) else None for row in rows], [r] * len(rows)) for r in range(count)
    ]


def by_slot(records: Sequence[RoundRecord], field: str, name: str) -> list[Slot]:
    """One column per place in the spread of a hyperparameter, from the lowest value to the highest.

    Replicas change places every round and are averaged, so a place means more over time than a replica.
    """
    rows: list[Any] = [
        record.values.get(name, []) if field == "values" else getattr(record, field) for record in records
    ]
    count = max((len(row) for row in rows), default=0)
    values: list[Numbers] = [[] for _ in range(count)]
    replicas: list[list[int | None]] = [[] for _ in range(count)]
    places: list[list[float]] = [[] for _ in range(count)]
    for record, row in zip(records, rows, strict=True):
        positions = record.positions.get(name, [])
        is_known = len(positions) == len(row) == count
        order = sorted(range(count), key=lambda r: (positions[r], r)) if is_known else [None] * count
        for slot, replica in enumerate(order):
            replicas[slot].append(replica)
            values[slot].append(None if replica is None else row[replica])
            if replica is not None:
                places[slot].append(positions[replica])
    means = [sum(place) / len(place) if place else 0.0 for place in places]
    return [Slot(*slot) for slot in zip(means, values, replicas, strict=True)]


def differences_from_mean(records: Sequence[RoundRecord]) -> list[list[tuple[int, float]]]:
    """Per round, each replica that counted and its loss (on the probe if there is one) minus their mean."""
    rounds = []
    for record in records:
        scores = record.probes or record.losses
        seen = [
            (r, s)
            for r, s in enumerate(scores)
            if s is not None and math.isfinite(s) and r not in record.excluded
        ]
        mean = sum(s for _, s in seen) / len(seen) if seen else 0.0
        rounds.append([(r, s - mean) for r, s in seen] if len(seen) > 1 else [])
    return rounds


def across_spread(
    records: Sequence[RoundRecord], differences: Sequence[Sequence[tuple[int, float]]], name: str
) -> list[Place]:
    """Those differences by the place in the spread of one hyperparameter, from the lowest to the highest."""
    sums: dict[float, list[float]] = {}
    for record, found in zip(records, differences, strict=True):
        positions, factors = record.positions.get(name, []), record.multipliers.get(name, [])
        is_fine = len(positions) > 17  # neighbours among many places are taken together
        for r, difference in found:
            if r < len(positions) and r < len(factors):
                place = round(8 * positions[r]) / 8 if is_fine else round(positions[r], 6)
                total = sums.setdefault(place, [0.0, 0.0, 0.0, 0.0])
                total[0] += 1
                total[1] += factors[r]
                total[2] += difference
                total[3] += difference * difference
    places = []
    for _, (count, factor, total, squares) in sorted(sums.items()):
        variance = max(0.0, (squares - total * total / count) / max(1, count - 1))
        places.append(Place(factor / count, total / count, math.sqrt(variance / count), int(count)))
    return places


def base_series(run: Run, name: str) -> tuple[list[int], list[float]]:
    """The base of every step; at the syncs only where no trace was kept."""
    points = [point for record in run.records for point in _trace(record, name)]
    if not points:
        points = [(record.step, record.base[name]) for record in run.records if name in record.base]
    return [step for step, _ in points], [value for _, value in points]


def plan_series(run: Run, name: str) -> tuple[list[int], list[float]]:
    """What the schedule had planned; empty if nothing was corrected."""
    tunable = re.sub(r"\[\d+\]$", "", name)  # fields of one tunable share its correction
    corrections = [record.correction.get(tunable, 1.0) for record in run.records]
    if all(abs(c - 1) < 1e-9 for c in corrections):
        return [], []
    points: list[tuple[int, float]] = []
    if run.config.get("controller") == "paper":
        # It holds the base between syncs: where the plan went meanwhile is known at the syncs only.
        for record, correction in zip(run.records, corrections, strict=True):
            points += _trace(record, name) if record is run.records[0] else []
            if name in record.base and math.isfinite(correction) and correction > 0:
                points.append((record.step, record.base[name] / correction))
    else:
        for record, in_force in zip(run.records, [1.0, *corrections], strict=False):
            points += [(step, value / in_force) for step, value in _trace(record, name) if in_force > 0]
    return [step for step, _ in points], [value for _, value in points]


def fan_limits(run: Run, name: str) -> tuple[list[int], list[float], list[float]]:
    """Lowest and highest value among the replicas, at every step whose base is known."""
    steps: list[int] = []
    lows: list[float] = []
    highs: list[float] = []
    is_complement = _is_complement(run, name)
    for record in run.records:
        factors = record.multipliers.get(name)
        if not factors:
            continue
        low, high = min(factors), max(factors)
        for step, base in _trace(record, name) or [(record.step, record.base.get(name, math.nan))]:
            steps.append(step)
            lows.append(1 - (1 - base) * high if is_complement else base * low)
            highs.append(1 - (1 - base) * low if is_complement else base * high)
    return steps, lows, highs


def _trace(record: RoundRecord, name: str) -> list[tuple[int, float]]:
    trace = record.base_trace.get(name, [])
    first = record.step - record.num_steps + 1
    if len(trace) == 1 and record.num_steps > 1:
        return [(first, trace[0]), (record.step, trace[0])]
    return list(zip(range(record.step - len(trace) + 1, record.step + 1), trace, strict=True))


def _is_complement(run: Run, name: str) -> bool:
    """Whether the spread is one of one minus the value, as for a momentum: which reading gives the values?"""
    plain = complement = 0.0
    for record in run.records[:20]:
        trace, factors, values = (
            _trace(record, name),
            record.multipliers.get(name, []),
            record.values.get(name, []),
        )
        if trace and len(factors) == len(values):
            base = trace[-1][1]
            plain += sum(abs(base * f - v) for f, v in zip(factors, values, strict=True))
            complement += sum(abs(1 - (1 - base) * f - v) for f, v in zip(factors, values, strict=True))
    return complement < plain

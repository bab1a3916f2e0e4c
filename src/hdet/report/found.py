"""What the finders did, taken from the records: the scout's trials and the anchored controller's path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hdet.report.runs import Run, number
from hdet.telemetry import ScoutDecision, ScoutRecord

__all__ = ["Anchored", "Choice", "Fan", "Parabola", "Scouted", "anchored_of", "scouted_of"]

_NEAR = 1.4
"""Trials at most this far from the best one, as a logarithm, count for the parabola."""


@dataclass(frozen=True, kw_only=True)
class Fan:
    """Trials of all replicas from the same weights."""

    stage: str
    points: list[tuple[float, float | None]]
    """Learning rate and loss, from the lowest rate to the highest; None where a trial failed."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The learning rate that the run began with."""

    lr: float
    low: float | None
    high: float | None
    """About one standard deviation on both sides of it."""
    factor: float
    """The same over the planned one."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Parabola:
    """minimum + curvature * (log lr - center)^2, for the eye."""

    center: float
    curvature: float
    minimum: float


@dataclass(frozen=True, kw_only=True)
class Scouted:
    """All that the scout did."""

    fans: list[Fan]
    choice: Choice | None = None
    """None where the records end before it decided."""
    parabola: Parabola | None = None

    @property
    def lrs(self) -> list[float]:
        """Every learning rate that was tried."""
        return [lr for fan in self.fans for lr, _ in fan.points]


@dataclass(frozen=True, kw_only=True)
class Anchored:
    """The path of the anchored controller, one entry per sync. Columns are by name of the learning rate."""

    steps: list[int]
    factors: dict[str, list[float | None]]
    """Its factor on what the run began with."""
    signals: dict[str, list[float | None]]
    """The normalised slope z that moves the factor."""
    num_brakes: int
    held_from: int | None
    """The step from which the factor was held, if it was."""
    reason: str
    """Why it was held."""

    @property
    def last_factors(self) -> list[float]:
        """The last known factor on each learning rate."""
        known = [[f for f in column if f is not None] for column in self.factors.values()]
        return [column[-1] for column in known if column]


def scouted_of(run: Run) -> Scouted | None:
    """What the scout did; None where no record tells of one."""
    seen = [record.scout for record in run.scouting if record.scout is not None]
    if not seen:
        return None
    fans = [_fan(fan) for fan in seen]
    last = seen[-1]
    if last.decision is None:
        return Scouted(fans=fans)
    points = [point for fan in fans if fan.stage == last.stage for point in fan.points]
    return Scouted(
        fans=fans,
        choice=_choice(last.decision, last.peak_lr),
        parabola=_parabola(points, _product(last.peak_lr, last.decision.chosen)),
    )


def anchored_of(run: Run) -> Anchored | None:
    """The path of the anchored controller; None where none was at work, or nobody knows where it began."""
    path = [r for r in run.records if r.ends_round and r.correction and r.signal]
    if run.config.get("controller") != "anchored" or not path:
        return None
    scouted = scouted_of(run)
    if scouted is not None and scouted.choice is None:
        return None
    start = 1.0 if scouted is None or scouted.choice is None else scouted.choice.factor
    held = next((record for record in path if record.gate), None)
    names = list(path[0].signal)
    return Anchored(
        steps=[record.step for record in path],
        factors={name: [_ratio(record.correction.get(name), start) for record in path] for name in names},
        signals={name: [number(record.signal.get(name)) for record in path] for name in names},
        num_brakes=path[-1].num_brakes,
        held_from=None if held is None else held.step,
        reason="" if held is None else held.gate,
    )


def _fan(seen: ScoutRecord) -> Fan:
    lrs = [_product(seen.peak_lr, factor) for factor in seen.factors]
    points = [(lr, number(score)) for lr, score in zip(lrs, seen.scores, strict=False) if lr is not None]
    return Fan(stage=seen.stage, points=sorted(points, key=lambda point: point[0]))


def _choice(decision: ScoutDecision, peak_lr: float) -> Choice | None:
    lr = _product(peak_lr, decision.factor)
    if lr is None:
        return None
    low, high = (_product(lr, _ratio(end, decision.chosen)) for end in (decision.low, decision.high))
    return Choice(lr=lr, low=low, high=high, factor=decision.factor, reason=decision.reason)


def _product(one: float | None, other: float | None) -> float | None:
    """None unless both, and what comes out, are finite and above zero."""
    known, factor = number(one), number(other)
    if known is None or factor is None or known <= 0 or factor <= 0:
        return None
    product = known * factor
    return product if 0 < product < math.inf else None


def _ratio(one: float | None, other: float) -> float | None:
    divisor = number(other)
    return None if not divisor else _product(one, 1 / divisor)


def _parabola(points: Sequence[tuple[float, float | None]], best_lr: float | None) -> Parabola | None:
    """Least squares around the scout's best; None where the trials do not lie in a valley."""
    center = math.log(best_lr or 1.0)
    offsets = [(math.log(lr) - center, loss) for lr, loss in points if loss is not None]
    near = [(offset**2, loss) for offset, loss in offsets if abs(offset) < _NEAR]
    if best_lr is None or len(near) < 3:
        return None
    mean_x, mean_y = (sum(column) / len(near) for column in zip(*near, strict=True))
    variance = sum((x - mean_x) ** 2 for x, _ in near)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in near) / (variance or math.inf)
    minimum = mean_y - slope * mean_x
    if not (slope > 0 and math.isfinite(minimum)):
        return None
    return Parabola(center=center, curvature=slope, minimum=minimum)

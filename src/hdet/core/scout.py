"""The scout: find the learning rate by short trials before the run, then start over. Pure decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from hdet.core.checks import require_count, require_flag, require_number, require_number_or_choice
from hdet.core.shape import one_cycle

__all__ = [
    "Decision",
    "Scout",
    "ScoutState",
    "advance",
    "decide",
    "least_steps",
    "may_move",
    "next_fan",
    "soft_minimum",
    "steps_per_fan",
    "trial_shape",
]

_POINTS_PER_STAGE = 6
"""Fewer replicas than this take several fans for a stage."""
_ROOM_ABOVE = 1.5
"""How far above the ceiling of the short trials the anchored controller may go: the run has a longer warm-up
and larger batches."""
_BELOW_A_CONTROLLER = 0.75
"""Optimizers like Adam: where the anchored controller follows, which rises more readily than it falls, the
run begins by this factor lower."""
_SPOILT = 0.1
"""A trial of the second stage that has lost this share of what the first one gained was not stable."""
_NARROW_BELOW, _NARROW_ABOVE = 10.0, 3.0
"""Range of the second stage around the best of the first: from weights past the first quick gains, learning
rates are lower."""


@dataclass(frozen=True, kw_only=True)
class Scout:
    r"""Settings of the scout; :class:`hdet.Ensemble` runs it in the first steps.

    In a *fan* every replica trains from the same weights, with its own gradients, at its own learning rate,
    through a complete miniature of the schedule; then all are scored on the same data. A first, wide stage
    starts from the initial weights (``span`` on both sides of the planned learning rate, moved where the best
    is at its edge). What it finds serves the quick gains of the first steps, which tell little of the rest of
    the run; so a second stage starts from the weights of the best trial of the first. Then everything is put
    back as it was, and the run begins, in the steps that remain, at

    .. math:: \eta = \eta_{\text{scout}} \cdot N^{b_B} \cdot f^{b_S}

    from one replica's batch to N of them, and from the short horizon to the long one; :math:`f` is the length
    of a fan of the second stage over the length of the run. With an optimizer like Adam and the anchored
    controller, at three quarters of that.

    >>> Scout(span=1.0)
    Traceback (most recent call last):
    ValueError: span must be a number above 1, got 1.0
    """

    fraction: float = 0.03
    """Share of the steps that the scout takes, if the range need not be moved."""
    steps: int | None = None
    """Mean length of a fan instead; needed where ``total_steps`` is not known."""
    min_steps: int = 20
    """The mean length is never below this: too short a horizon says little."""
    span: float = 100.0
    """The first stage tests learning rates from 1 / span to span times the planned one."""
    max_moves: int = 2
    """How often the range may be moved where the best is at its edge."""
    batch_exponent: float | Literal["auto"] = "auto"
    """b_B; ``"auto"`` is 0.27 for optimizers that divide by a second moment, like Adam, else 0.75."""
    horizon_exponent: float | Literal["auto"] = "auto"
    """b_S; ``"auto"`` is 0.2 for optimizers like Adam and 0.25 for others."""
    data_repeats: bool = False
    """Training data will be seen several times, which asks for less: ``"auto"`` is then 0 for b_B and 1/3 for
    b_S."""
    tail: float = 0.3
    """Without a probe a replica's score is its mean training loss over this last share of the fan."""
    copy_on_cpu: bool = False
    """Keep the copy of the initial weights in host memory."""

    def __post_init__(self) -> None:
        require_number("fraction", self.fraction, above=0, below=1)
        if self.steps is not None:
            require_count("steps", self.steps, at_least=2)
        require_count("min_steps", self.min_steps, at_least=2)
        require_number("span", self.span, above=1)
        require_count("max_moves", self.max_moves, at_least=0)
        require_number_or_choice("batch_exponent", self.batch_exponent, ("auto",))
        require_number_or_choice("horizon_exponent", self.horizon_exponent, ("auto",))
        require_flag("data_repeats", self.data_repeats)
        require_number("tail", self.tail, above=0)
        require_flag("copy_on_cpu", self.copy_on_cpu)

    def transfer(
        self, num_replicas: int, share: float, *, is_adaptive: bool, is_corrected: bool = False
    ) -> float:
        """The factor from the scout's best learning rate to the run's.

        Args:
            num_replicas: N.
            share: length of a fan over that of the run.
            is_adaptive: whether the optimizer divides by the gradient's size.
            is_corrected: whether the anchored controller follows.

        >>> round(Scout().transfer(8, 1.0, is_adaptive=True), 3)
        1.753
        """
        auto = (0.0, 1 / 3) if self.data_repeats else (0.27, 0.2) if is_adaptive else (0.75, 0.25)
        batch = auto[0] if self.batch_exponent == "auto" else self.batch_exponent
        horizon = auto[1] if self.horizon_exponent == "auto" else self.horizon_exponent
        room = _BELOW_A_CONTROLLER if is_corrected and is_adaptive and not self.data_repeats else 1.0
        return room * num_replicas**batch * share**horizon


@dataclass(frozen=True, kw_only=True)
class ScoutState:
    """What the scout has seen. Factors are on the planned learning rate."""

    factors: tuple[float, ...] = ()
    scores: tuple[float | None, ...] = ()
    """None where a replica failed; the lower the better."""
    grid: tuple[float, ...] = ()
    """Factors that the current stage still has to test."""
    stage: Literal["wide", "narrow", "done"] = "wide"
    center: float = 1.0
    half_width: float = 0.0
    """Of the current stage, as a logarithm."""
    num_moves: int = 0
    num_wide: int = 0
    """How many of the trials belong to the first stage."""
    chosen: float = 1.0
    """The best factor, before the transfer."""
    low: float = 1.0
    high: float = 1.0
    """One standard deviation on both sides of it."""
    ceiling: float = math.inf
    """Half way from the largest factor that trained to the smallest above it that spoilt the weights."""
    is_found: bool = False
    """Whether ``chosen`` comes from trials, and not from the plan."""
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ScoutState:
        """The state of a checkpoint."""
        values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in data.items()}
        return cls(**values)


def steps_per_fan(
    settings: Scout, num_replicas: int, total_steps: int | None
) -> dict[Literal["wide", "narrow"], int]:
    """Length of a fan of each stage; the first one is only there to find the range, and takes a quarter.

    >>> steps_per_fan(Scout(fraction=0.03), 8, 10_000)
    {'wide': 75, 'narrow': 225}
    >>> steps_per_fan(Scout(), 8, 500)
    {'wide': 10, 'narrow': 30}
    """
    mean = _mean_steps_per_fan(settings, num_replicas, total_steps)
    wide = max(1, mean // 2)
    return {"wide": wide, "narrow": 2 * mean - wide}


def _mean_steps_per_fan(settings: Scout, num_replicas: int, total_steps: int | None) -> int:
    if settings.steps is not None:
        return settings.steps
    if total_steps is None:
        raise ValueError(
            "steps must be given to Scout where total_steps is not known, got None: pass Scout(steps=...) or "
            "total_steps=..."
        )
    num_fans = 2 * math.ceil(_POINTS_PER_STAGE / num_replicas)
    return max(settings.min_steps, round(settings.fraction * total_steps / num_fans))


def least_steps(settings: Scout, num_replicas: int, total_steps: int | None = None) -> int:
    """The shortest run that is worth scouting: the scout may take at most half of it.

    >>> least_steps(Scout(), 8), least_steps(Scout(), 1)
    (80, 480)
    """
    num_fans = 2 * math.ceil(_POINTS_PER_STAGE / num_replicas)
    return 2 * num_fans * _mean_steps_per_fan(settings, num_replicas, total_steps or 1)


def may_move(
    state: ScoutState, settings: Scout, num_replicas: int, total_steps: int | None, num_steps_used: int
) -> bool:
    """Whether the stage may be repeated in another range: not too often, nor beyond half of the run.

    >>> may_move(ScoutState(), Scout(), 8, 1000, 10), may_move(ScoutState(), Scout(), 8, 80, 10)
    (True, False)
    """
    if state.num_moves >= settings.max_moves or state.stage == "done":
        return False
    if total_steps is None:
        return True
    lengths, num_fans = steps_per_fan(settings, num_replicas, total_steps), _fans_per_stage(num_replicas)
    ahead = lengths[state.stage] + (lengths["narrow"] if state.stage == "wide" else 0)
    return 2 * (num_steps_used + num_fans * ahead) <= total_steps


def _fans_per_stage(num_replicas: int) -> int:
    return math.ceil(_POINTS_PER_STAGE / num_replicas)


def trial_shape(step: int, num_steps: int) -> float:
    """The miniature schedule of a fan: 20 % warm-up, then down to a hundredth of the peak."""
    return one_cycle(step, num_steps, warmup=0.2, start=1 / 25, end=0.01)


def next_fan(state: ScoutState, settings: Scout, num_replicas: int) -> tuple[ScoutState, list[float]]:
    """The learning rates of the next fan, one per replica, as factors on the planned one.

    A stage begins with laying out its grid, of which each fan takes a part.

    >>> state, factors = next_fan(ScoutState(), Scout(span=10), 8)
    >>> [round(f, 2) for f in factors]
    [0.1, 0.19, 0.37, 0.72, 1.39, 2.68, 5.18, 10.0]
    """
    if not state.grid:
        num_points = num_replicas * _fans_per_stage(num_replicas)
        half_width = math.log(settings.span)
        if state.stage == "narrow":
            half_width = math.log(_NARROW_BELOW * _NARROW_ABOVE) / 2
        places = [2 * i / (num_points - 1) - 1 for i in range(num_points)]
        grid = tuple(state.center * math.exp(half_width * place) for place in places)
        state = replace(state, half_width=half_width, grid=grid)
    return state, list(state.grid[:num_replicas])


def advance(
    state: ScoutState, factors: Sequence[float], scores: Sequence[float | None], *, may_move: bool
) -> tuple[ScoutState, int | None]:
    """Take the scores of a fan: go on with the stage, move the range, begin the next stage, or decide.

    Args:
        state: as :func:`next_fan` returned it.
        factors: of the fan's trials.
        scores: None or not finite where a replica failed.
        may_move: whether the stage may be repeated in another range, see :func:`may_move`.

    Returns:
        The new state, and the replica that has done best so far in the first stage, if this fan has it: the
        second stage starts from its weights.
    """
    valid = [s if s is not None and math.isfinite(s) else None for s in scores]
    leader = _leader(state, valid) if state.stage == "wide" else None
    state = replace(
        state,
        factors=(*state.factors, *factors),
        scores=(*state.scores, *valid),
        grid=state.grid[len(factors) :],
    )
    if not state.grid:
        state = (_end_wide if state.stage == "wide" else _end_narrow)(state, may_move)
    return state, leader


def _leader(state: ScoutState, scores: Sequence[float | None]) -> int | None:
    before = min((s for s in state.scores if s is not None), default=math.inf)
    best = min((s for s in scores if s is not None), default=math.inf)
    return scores.index(best) if best < before else None


def _end_wide(state: ScoutState, may_move: bool) -> ScoutState:
    points = _points(state, slice(None))
    if not points:
        if not may_move:
            return _keep(state, "no replica had a finite score")
        # Lower ones may train.
        return replace(state, num_moves=state.num_moves + 1, center=min(state.factors))
    values = [s for _, s in points]
    # A loss that hardly moves over the whole range has nothing to say about it.
    is_flat = max(values) - min(values) <= 1e-4 * max(abs(v) for v in values)
    if is_flat and len(points) == len(state.factors):
        return _keep(state, "the loss is the same over the whole range")
    best = values.index(min(values))
    center = points[best][0]
    is_at_edge = center in (min(state.factors), max(state.factors))
    if is_at_edge and may_move:
        return replace(state, num_moves=state.num_moves + 1, center=center)
    if not is_at_edge and 0 < best < len(points) - 1:
        center = _vertex(points[best - 1 : best + 2])
    center *= math.sqrt(_NARROW_ABOVE / _NARROW_BELOW)
    return replace(state, stage="narrow", center=center, num_wide=len(state.factors))


def _end_narrow(state: ScoutState, may_move: bool) -> ScoutState:
    points = _points(state, slice(state.num_wide, None))
    if not points:
        wide = _points(state, slice(state.num_wide))
        return _choose(state, wide, "no trial of the second stage had a finite score")
    best, _ = min(points, key=lambda point: point[1])
    tested = state.factors[state.num_wide :]
    is_at_edge = best in (min(tested), max(tested))
    if is_at_edge and may_move:
        return replace(state, num_moves=state.num_moves + 1, center=best)
    near = [(f, s) for f, s in points if abs(math.log(f / state.center)) <= 1.001 * state.half_width]
    reason = "the best is at the edge of what was tested" if is_at_edge else ""
    return _choose(state, near if len(near) >= 3 else points, reason)


def _choose(state: ScoutState, points: Sequence[tuple[float, float]], reason: str) -> ScoutState:
    chosen, spread = soft_minimum(points)
    return replace(
        state,
        stage="done",
        is_found=True,
        chosen=chosen,
        low=chosen / spread,
        high=chosen * spread,
        ceiling=_ceiling(state, chosen),
        reason=reason,
    )


def _keep(state: ScoutState, reason: str) -> ScoutState:
    return replace(state, stage="done", grid=(), reason=reason, chosen=1.0, low=1.0, high=1.0)


def _points(state: ScoutState, trials: slice) -> list[tuple[float, float]]:
    """Factors and scores of the trials that did not fail, by factor."""
    pairs = zip(state.factors[trials], state.scores[trials], strict=True)
    return sorted((f, s) for f, s in pairs if s is not None)


def soft_minimum(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    r"""Where the lowest scores are, on a logarithmic scale, and the factor of one standard deviation.

    The mean of log factors with weights :math:`\exp(-(s_i - \min s)/\tau)`, tau the distance from the lowest
    score to that below which a third of them lie: noise moves it little, and a flat valley gives its middle.

    >>> center, spread = soft_minimum([(0.5, 2.0), (1.0, 1.0), (2.0, 2.0)])
    >>> round(center, 6), spread > 1
    (1.0, True)
    """
    scores = sorted(s for _, s in points)
    scale = scores[max(min(1, len(scores) - 1), len(scores) // 3)] - scores[0] or 1.0
    weights = [math.exp(-(s - scores[0]) / scale) for _, s in points]
    total = math.fsum(weights)
    logs = [math.log(f) for f, _ in points]
    mean = math.fsum(w * x for w, x in zip(weights, logs, strict=True)) / total
    variance = math.fsum(w * (x - mean) ** 2 for w, x in zip(weights, logs, strict=True)) / total
    # The weighted mean of independent points; an effective number of them carries the weight.
    effective = total**2 / math.fsum(w * w for w in weights)
    return math.exp(mean), math.exp(math.sqrt(variance / effective))


def _vertex(points: Sequence[tuple[float, float]]) -> float:
    """The lowest point of the parabola through three points, at most half a gap from the middle one."""
    (_, a), (middle, b), (right, c) = points
    curvature = a - 2 * b + c
    shift = 0.5 * (a - c) / curvature if curvature > 0 else 0.0
    return middle * (right / middle) ** min(0.5, max(-0.5, shift))


def _ceiling(state: ScoutState, chosen: float) -> float:
    """Between the first factor above the best that spoilt its weights, and the last one before it.

    Where the second stage has tested, a short trial of the first that did badly does not count.
    """
    wide = _points(state, slice(state.num_wide))
    untrained, lead = wide[0][1], min(score for _, score in wide)
    worst = [untrained, lead + _SPOILT * (untrained - lead)]  # by stage
    tested_again = max(state.factors[state.num_wide :], default=0.0)
    stable = chosen
    trials = enumerate(zip(state.factors, state.scores, strict=True))
    for i, (factor, score) in sorted(trials, key=lambda trial: trial[1][0]):
        is_narrow = i >= state.num_wide
        is_spoilt = score is None or score > worst[is_narrow]
        if factor < chosen or (is_spoilt and not is_narrow and factor < tested_again):
            continue
        if is_spoilt:
            return math.sqrt(stable * factor)
        stable = factor
    return math.inf


class Decision(NamedTuple):
    """What the run begins with, and how it came about."""

    factor: float
    """On the planned learning rate."""
    transfer: float
    """From the trials to the run."""
    reason: str
    room_above: float
    """How far a controller may raise the factor, by what trials did not survive."""


def decide(
    state: ScoutState,
    settings: Scout,
    *,
    num_joined: int,
    narrow_steps: int,
    steps_left: int | None,
    is_adaptive: bool,
    is_corrected: bool,
) -> Decision:
    """The factor for the run.

    Args:
        state: of a scout that is done.
        settings: with the exponents of the transfer.
        num_joined: how many replicas' batches one gradient of the run sees.
        narrow_steps: length of a trial of the second stage.
        steps_left: length of the run; None if it is not known.
        is_adaptive: whether the optimizer divides by the gradient's size.
        is_corrected: whether the anchored controller follows.

    >>> found = ScoutState(stage="done", is_found=True, chosen=2.0)
    >>> facts = {"num_joined": 8, "narrow_steps": 10, "steps_left": 1000}
    >>> round(decide(found, Scout(), **facts, is_adaptive=True, is_corrected=False).factor, 3)
    1.396
    """
    transfer = 1.0
    if state.is_found:
        share = 1.0 if steps_left is None else min(1.0, narrow_steps / max(1, steps_left))
        transfer = settings.transfer(num_joined, share, is_adaptive=is_adaptive, is_corrected=is_corrected)
    factor, reason = state.chosen * transfer, state.reason
    if factor > state.ceiling:
        factor, reason = state.ceiling, "higher ones were not stable"
    return Decision(factor, transfer, reason, _ROOM_ABOVE * state.ceiling / factor)

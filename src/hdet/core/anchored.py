"""The anchored controller: move the learning rate by its effect over the whole run so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hdet.core.checks import require_count, require_flag, require_number
from hdet.core.loss_watch import LossWatch, watch_loss

__all__ = [
    "AnchoredController",
    "AnchoredMemory",
    "AnchoredState",
    "anchored_update",
    "averaging_weight",
    "control",
    "log_factors",
    "measuring_interval",
    "next_control",
    "slowed",
    "watch_probe",
]

_MEASURED_PER_GAP = 8
"""Steps between two control times that are at least measured: more tell little more, and each has a price."""


@dataclass(frozen=True, kw_only=True)
class AnchoredController:
    r"""Settings of the anchored controller; give it to :class:`hdet.Ensemble` as ``controller``.

    Let x0 be the weights at the start, E their running average over the last part of the elapsed steps, and g
    the gradient that the optimizer uses. If update directions did not change, x - x0 would be the derivative
    of the weights by the logarithm of the learning rate, over the whole elapsed run; so

    .. math:: a_t = \langle g_t, E_t - x_0 \rangle

    is the slope of the loss on log learning rate: below zero, a larger one would have been better. At control
    times, evenly spaced in the logarithm of the step, the sign and size of its smoothed mean move the
    correction. A parameter group follows its own part of the slope where that asks for more; less is not to
    be trusted. It needs no replicas and no spread. It keeps two copies of the weights, and in a long run
    looks at 8 to 15 of the steps between two control times.

    Where the training loss jumps up, all corrections are halved at once, and are one at most: it brakes.

    The slope is the training loss's: where data repeats, it asks for ever more. See ``repeats_after``.

    >>> AnchoredController(limit=0.5)
    Traceback (most recent call last):
    ValueError: limit must be a number of at least 1, got 0.5
    """

    start: float = 0.1
    """Share of the run in which it only watches."""
    gain: float = 1.0
    """How far the log correction moves for a clear signal, per unit of log time."""
    average: float = 0.1
    """Share of the elapsed steps that E averages over."""
    limit: float = 2.0
    """The common correction stays between 1 / limit and limit: far off, the signal cannot be trusted."""
    per_group: bool = True
    """Whether a parameter group whose own part of the signal asks for more than the whole may rise further;
    see ``group_limit``. It needs ``LearningRate(per_group=True)``."""
    repeats_after: float | None = None
    """Optimizer steps after which training data repeats; from there on the correction stays where it is.
    ``math.inf`` if it never does, None if you do not know: then the probe is watched, if there is one."""
    max_rise: float = 0.02
    """Where the probe is watched: the correction stays where it is once the probe's loss is this share above
    its lowest at three syncs in a row."""
    copy_on_cpu: bool = False
    """Keep the two copies in host memory; slower."""
    copy_in_bfloat16: bool = False
    """Keep the two copies in half of the memory of float32. E is rounded at random, up or down by how near,
    so that its many small moves are not lost; slower, and the signal is a little noisier."""

    def __post_init__(self) -> None:
        require_number("start", self.start, at_least=0, below=1)
        require_number("gain", self.gain, above=0)
        require_number("average", self.average, above=0)
        require_number("limit", self.limit, at_least=1)
        require_flag("per_group", self.per_group)
        if self.repeats_after not in (None, math.inf):
            remedy = "math.inf says never, None that you do not know"
            require_count("repeats_after", self.repeats_after, at_least=0, remedy=remedy)
        require_number("max_rise", self.max_rise, above=0)
        require_flag("copy_on_cpu", self.copy_on_cpu)
        require_flag("copy_in_bfloat16", self.copy_in_bfloat16)

    @property
    def group_limit(self) -> float:
        """How far a group may rise by its own signal: the square of ``limit``, at most twice it.

        >>> AnchoredController().group_limit, AnchoredController(limit=1).group_limit
        (4.0, 1)
        """
        return self.limit * min(self.limit, 2.0)


class AnchoredState(NamedTuple):
    """What the controller remembers of one factor: that of all groups together, or that of one."""

    log_factor: float = 0.0
    mean: float = 0.0
    mean_square: float = 0.0
    num_controls: int = 0


def averaging_weight(settings: AnchoredController, num_steps: int, interval: int = 1) -> float:
    """The weight of the newest weights in E after this many steps, of which one in ``interval`` is averaged.

    >>> averaging_weight(AnchoredController(), 5), averaging_weight(AnchoredController(), 100)
    (1.0, 0.1)
    >>> averaging_weight(AnchoredController(), 100, interval=3)
    0.3
    """
    return interval / max(float(interval), settings.average * num_steps)


def next_control(num_steps: int, total_steps: int) -> int:
    """The step of the next control time: gaps of 3 % of the elapsed steps, at least 2.

    >>> next_control(0, 10_000), next_control(100, 10_000), next_control(10, 10_000)
    (40, 103, 12)
    """
    if num_steps == 0:
        return max(4, round(0.004 * total_steps))
    return num_steps + max(2, round(0.03 * num_steps))


def measuring_interval(gap: int) -> int:
    """Every how many steps the signal is taken and E is moved, by the gap between two control times.

    One step in seven at 2000 steps, one in 37 at 10 000: a long run hardly notices the controller.

    >>> [measuring_interval(next_control(t, 10_000) - t) for t in (100, 1000, 2000, 10_000)]
    [1, 3, 7, 37]
    """
    return max(1, gap // _MEASURED_PER_GAP)


def slowed(state: AnchoredState, settings: AnchoredController) -> AnchoredState:
    """Where the weights are being spoilt: at most the plan, and at most half of what it was.

    >>> slowed(AnchoredState(log_factor=math.log(4)), AnchoredController()).log_factor
    0.0
    """
    lowest = -math.log(settings.limit)
    return state._replace(log_factor=max(lowest, min(0.0, state.log_factor - math.log(2))))


def anchored_update(
    state: AnchoredState,
    signal: float,
    log_time: float,
    settings: AnchoredController,
    *,
    acts: bool,
    highest: float,
) -> tuple[AnchoredState, float]:
    r"""One control time: the new state, and the normalised signal z.

    .. math:: m_1 \leftarrow 0.7\, m_1 + 0.3\, s, \quad m_2 \leftarrow 0.9\, m_2 + 0.1\, s^2, \quad
        z = \mathrm{clip}(\hat m_1 / \sqrt{\hat m_2}), \quad u \leftarrow u - k z \Delta \log t

    Args:
        state: what was remembered.
        signal: mean of a since the last control time, s.
        log_time: how far the logarithm of the step has moved.
        settings: gain k, and the limit downwards.
        acts: whether the correction may move; what is remembered goes on all the same.
        highest: upper limit of the factor.

    >>> state, z = anchored_update(AnchoredState(), -2.0, 0.1, AnchoredController(), acts=True, highest=2.0)
    >>> round(state.log_factor, 6), round(z, 6)
    (0.1, -1.0)
    """
    mean = 0.7 * state.mean + 0.3 * signal
    mean_square = 0.9 * state.mean_square + 0.1 * signal * signal
    count = state.num_controls + 1
    size = math.sqrt(mean_square / (1 - 0.9**count))
    z = mean / (1 - 0.7**count) / size if size > 0 else 0.0
    z = min(1.0, max(-1.0, z))
    log_factor = state.log_factor
    if acts:
        log_factor -= settings.gain * z * log_time
        log_factor = min(math.log(highest), max(-math.log(settings.limit), log_factor))
    return AnchoredState(log_factor, mean, mean_square, count), z


class AnchoredMemory(NamedTuple):
    """All that the controller remembers of a run from one control time to the next."""

    states: tuple[AnchoredState, ...]
    """Of all groups together, then of each group that is followed on its own."""
    signals: tuple[float, ...]
    """Normalised, of the last control time, in the same order."""
    watch: LossWatch = LossWatch()
    ceiling: float = math.inf
    """Upper limit of the factors, beside those of the settings."""
    num_brakes: int = 0
    """How often all corrections were cut, because the training loss jumped up."""
    gate: str = ""
    """Why the corrections no longer move."""
    lowest_probe: float = math.inf
    num_risen: int = 0
    """Syncs in a row at which the probe's loss was above its lowest."""


def control(
    memory: AnchoredMemory,
    signals: Sequence[float],
    loss: float | None,
    settings: AnchoredController,
    *,
    log_time: float,
    acts: bool,
) -> AnchoredMemory:
    """A control time: move the corrections, or brake.

    Args:
        memory: what was remembered.
        signals: means since the last control time, in the order of the states.
        loss: mean training loss of all replicas since the last control time, if it is known.
        settings: of the controller.
        log_time: how far the logarithm of the step has moved.
        acts: whether the run is long enough under way for the corrections to move.
    """
    acts = acts and not memory.gate
    is_spoilt = False
    if loss is not None:
        watch, is_spoilt = watch_loss(memory.watch, loss)
        memory = memory._replace(watch=watch)
    if acts and is_spoilt:  # back to the plan, and not as high again
        acts = False
        highest = max(state.log_factor for state in memory.states)
        memory = memory._replace(
            num_brakes=memory.num_brakes + 1,
            ceiling=min(memory.ceiling, math.exp(max(0.0, highest / 2))),
            states=tuple(slowed(state, settings) for state in memory.states),
        )
    states, normalised = list(memory.states), list(memory.signals)
    for i, signal in enumerate(signals):
        if math.isfinite(signal):
            limit = settings.group_limit if i else settings.limit
            states[i], normalised[i] = anchored_update(
                states[i], signal, log_time, settings, acts=acts, highest=min(limit, memory.ceiling)
            )
    return memory._replace(states=tuple(states), signals=tuple(normalised))


def log_factors(memory: AnchoredMemory, num_groups: int) -> list[float]:
    """Of each group: the larger of the common factor and its own.

    >>> memory = AnchoredMemory((AnchoredState(0.2), AnchoredState(0.5), AnchoredState(0.1)), (0.0,) * 3)
    >>> log_factors(memory, 2)
    [0.5, 0.2]
    """
    common, *own = (state.log_factor for state in memory.states)
    return [max(common, log_factor) for log_factor in own] or [common] * num_groups


def watch_probe(
    memory: AnchoredMemory, num_steps: int, probe: float | None, settings: AnchoredController
) -> AnchoredMemory:
    """At a sync: close the gate where the training loss is no longer what should be lowered.

    Args:
        memory: what was remembered.
        num_steps: optimizer steps so far.
        probe: mean loss on the probe, if it was asked for.
        settings: of the controller.
    """
    if memory.gate:
        return memory
    if settings.repeats_after is not None:
        repeats = num_steps >= settings.repeats_after
        return memory._replace(gate="training data repeats") if repeats else memory
    if probe is None or not math.isfinite(probe):
        return memory
    lowest = min(memory.lowest_probe, probe)
    has_risen = probe > lowest + settings.max_rise * abs(lowest)
    num_risen = memory.num_risen + 1 if has_risen else 0
    gate = "the loss on the probe keeps above its lowest" if num_risen == 3 else ""  # one may be chance
    return memory._replace(lowest_probe=lowest, num_risen=num_risen, gate=gate)

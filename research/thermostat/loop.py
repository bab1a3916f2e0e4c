"""The thermostat: moves the learning rate by what averaging gains, against what time gains.

Standard library only: state in, new state out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

__all__ = [
    "Reading",
    "Round",
    "Settings",
    "State",
    "posterior_mean",
    "reading_of",
    "rise_of",
    "slope",
    "steered",
]


_TINY = 1e-12


class Round(NamedTuple):
    """What a run saw in one round."""

    step: int
    """Steps done at its end."""
    middle: float
    """Mean number of steps that the averaged weights had seen."""
    lr: float
    """Mean learning rate, over the peak that the run began with."""
    shape: float
    """Mean of the schedule, over its peak."""
    end: float
    """Loss of the last weights on the probe."""
    mean: float
    """Loss of the mean of the round's weights on the probe."""
    train: float
    """Mean training loss."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Constants, chosen on dev problems."""

    target: float = 0.28
    """E / P at the best learning rate."""
    gain: float = 0.75
    """How far ln LR is off, over how far ln(E / P) is."""
    error: float = 0.6
    """Deviation of the law in ln LR, from problem to problem."""
    priors: tuple[tuple[float, float, float], ...] = ((0.7, 0.0, 0.1), (0.3, 0.0, 2.2))
    """What is known of ln(best LR / start): weight, mean and deviation of each part."""
    first: int = 6
    """The first round after which the learning rate moves, ..."""
    last: int = 14
    """... and the last one."""
    vanished: float = 0.2
    """Share of its first value below which the loss has nearly vanished, so that only noise is left."""
    ended: float = 0.2
    """P over the fall of the loss so far, below which the loss has come to its floor."""
    jump: float = 0.25
    """Rise of the training loss above its lowest that counts as a jump, over that and over its fall."""
    fallen: float = 0.1
    """Fall of ln LR after which it does not rise again."""
    most_per_round: float = 0.3
    most: float = 2.5
    """Bounds on the steps of ln LR, and on their sum."""


class State(NamedTuple):
    """Where the thermostat is."""

    log_factor: float = 0.0
    """ln of the factor on the planned schedule."""
    highest: float = 0.0
    """The highest that it was."""
    rounds: tuple[Round, ...] = ()


class Reading(NamedTuple):
    """E and P with their standard errors."""

    gain: float
    progress: float
    gain_error: float
    progress_error: float


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Fit a line by least squares, and give its slope.

    >>> slope([0.0, 1.0, 2.0], [5.0, 6.0, 10.0])
    2.5
    """
    middle_x, middle_y = fmean(x), fmean(y)
    above = math.fsum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return above / math.fsum((a - middle_x) ** 2 for a in x)


def reading_of(rounds: Sequence[Round], factor: float = 1.0) -> Reading:
    r"""Read what averaging and time gain from the later half of the rounds.

    .. math:: P = -\mathrm{slope}(\bar L_k \text{ on } \ln m_k), \qquad
        E = \mathrm{mean}_k \frac{L_k - \bar L_k + P \ln(t_k / m_k)}{\eta_k / \eta}

    :math:`L_k` and :math:`\bar L_k` are the losses of a round's last weights and of their mean,
    :math:`t_k` and :math:`m_k` the steps at its end and in its middle. ``factor`` is the peak :math:`\eta`
    that the run has come to, in the unit of each round's ``lr``.
    """
    seen = _later_half(rounds)
    x, y = [math.log(r.middle) for r in seen], [r.mean for r in seen]
    progress = -slope(x, y)
    center, level = fmean(x), fmean(y)
    rest = [b - level + progress * (a - center) for a, b in zip(x, y, strict=True)]
    spread = math.fsum((a - center) ** 2 for a in x)
    progress_error = math.sqrt(math.fsum(e * e for e in rest) / (len(seen) - 2) / spread)
    gains = [(r.end - r.mean + progress * math.log(r.step / r.middle)) * factor / r.lr for r in seen]
    gain = fmean(gains)
    scatter = math.fsum((g - gain) ** 2 for g in gains) / (len(gains) - 1)
    return Reading(gain, progress, math.sqrt(scatter / len(gains)), progress_error)


def _later_half(rounds: Sequence[Round]) -> Sequence[Round]:
    return rounds[len(rounds) // 2 - 1 :]


def posterior_mean(priors: Sequence[tuple[float, float, float]], measured: float, deviation: float) -> float:
    """Weigh what was measured against a mixture of normal priors.

    >>> posterior_mean([(1.0, 0.0, 1.0)], 3.0, 1.0)
    1.5
    """
    variance = deviation * deviation
    logs, means = [], []
    for weight, mean, width in priors:
        total = width * width + variance
        logs.append(math.log(weight) - math.log(total) / 2 - (measured - mean) ** 2 / total / 2)
        means.append((mean * variance + measured * width * width) / total)
    shares = [math.exp(value - max(logs)) for value in logs]
    return math.fsum(s * m for s, m in zip(shares, means, strict=True)) / math.fsum(shares)


def rise_of(rounds: Sequence[Round]) -> tuple[float, float]:
    """Tell how far the last training loss is above the lowest: over that, and over the fall till then.

    >>> rise_of([Round(k, k, 1.0, 1.0, 0.0, 0.0, train) for k, train in enumerate((5.0, 1.0, 2.5))])
    (1.5, 0.375)
    """
    lowest = min(r.train for r in rounds[:-1])
    rise, fall = rounds[-1].train - lowest, rounds[0].train - lowest
    return rise / max(abs(lowest), _TINY), rise / max(fall, _TINY)


def steered(state: State, seen: Round, settings: Settings) -> State:
    """Take a round, and move the factor.

    Where averaging gains more than it should, against time, the learning rate is too high. It falls where the
    training loss jumps, and does not rise as long as a round in sight had a loss well above its lowest. Once
    it has fallen it does not rise again. Nothing moves before ``first`` and after ``last``, where time gains
    next to nothing any more, and where the loss has nearly vanished and averaging would halve the rest.
    """
    rounds = (*state.rounds, seen)
    state = state._replace(rounds=rounds)
    if not settings.first <= len(rounds) <= settings.last:
        return state
    if not all(math.isfinite(value) for r in rounds for value in (r.end, r.mean, r.train)):
        return state
    rises = [rise_of(rounds[: k + 1]) for k in range(len(rounds) // 2 - 1, len(rounds))]
    if min(rises[-1]) > settings.jump:
        return _moved(state, -settings.most_per_round, settings)
    read = reading_of(rounds, math.exp(state.log_factor))
    fall = rounds[1].mean - fmean(r.mean for r in _later_half(rounds))
    if read.progress + 2 * read.progress_error < settings.ended * fall:
        return state
    gain, progress = max(read.gain, read.gain_error), max(read.progress, read.progress_error)
    if max(read.gain, read.progress) <= 0 or min(gain, progress) <= 0:
        return state
    if seen.mean < settings.vanished * rounds[0].mean and gain > seen.mean / 2:
        return state
    noise = math.hypot(read.gain_error / gain, read.progress_error / progress)
    measured = state.log_factor - settings.gain * math.log(gain / progress / settings.target)
    wanted = posterior_mean(settings.priors, measured, math.hypot(settings.error, settings.gain * noise))
    step = wanted - state.log_factor
    # Where the learning rate has fallen, the loss falls with the noise, which looks like progress.
    has_fallen = state.log_factor < state.highest - settings.fallen
    may_rise = not has_fallen and max(rises)[0] <= settings.jump
    return _moved(state, step if may_rise else min(0.0, step), settings)


def _moved(state: State, step: float, settings: Settings) -> State:
    step = max(-settings.most_per_round, min(settings.most_per_round, step))
    log_factor = max(-settings.most, min(settings.most, state.log_factor + step))
    return state._replace(log_factor=log_factor, highest=max(state.highest, log_factor))

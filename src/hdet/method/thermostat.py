"""The thermostat: move the learning rate by what averaging gains, against what time gains. Pure decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from hdet.checks import is_list, require_kind, require_number

Priors = tuple[tuple[float, float, float], ...]
"""What is known of ln(best learning rate / start): weight, mean and deviation of each part."""
GUESS: Priors = ((0.7, 0.0, 0.1), (0.3, 0.0, 2.2))
"""Of a guess."""
FOUND: Priors = ((0.5, 0.0, 0.15), (0.5, 0.2, 1.3))
"""Of an answer of ``find_lr``."""
NUM_ROUNDS = 40
"""Rounds of a run."""
FIRST, LAST = 6, 14
"""The first round after which the learning rate moves, and the last one. The warm-up has 16."""
LEAST_STEPS = 5
"""Of a round: a mean over fewer says nothing."""
MOST_PER_ROUND, MOST = 0.3, 2.5
"""Bounds on the steps of ln LR, and on their sum."""
_GAIN = 0.75
"""How far ln LR is off, over how far ln(E / P) is."""
_ERROR = 0.6
"""Deviation of the law in ln LR, from problem to problem."""
_VANISHED = 0.2
"""Share of its first value below which the loss has nearly vanished, so that only noise is left."""
_ENDED = 0.2
"""P over the fall of the loss so far, below which the loss has come to its floor."""
_JUMP = 0.25
"""Rise of the training loss above its lowest that counts as a jump, over that and over its fall."""
_FALLEN = 0.1
"""Fall of ln LR after which it does not rise again."""
_BY_HEART = 0.4
"""How far the probe's loss is below the training loss, over the fall of the latter, where the model knows the
probe by heart."""
_TINY, _HUGE = 1e-12, 1e100


class Round(NamedTuple):
    """What a run saw in one round."""

    step: int
    """Steps done at its end."""
    middle: float
    """Mean number of steps that the averaged weights had seen."""
    lr: float
    """Mean learning rate, over the peak that the run began with."""
    end: float
    """Loss of the last weights on the probe."""
    mean: float
    """Loss of the mean of the round's weights on the probe."""
    train: float
    """Mean training loss."""


@dataclass(frozen=True, kw_only=True)
class Thermostat:
    """Steer the learning rate of the warm-up by what averaging the weights gains, against what time gains.

    A round is a fortieth of the run. At its end the last weights and the mean of its weights are scored on
    the probe. At a good learning rate averaging gains about a quarter of what an e-fold of steps does. Where
    it gains more, the learning rate falls, and where it gains less, it rises. The first move comes after 15 %
    of the run, the last after 35 %, before the peak.

    It needs an :class:`hdet.Probe` and the loss in ``step(loss)``. Until its last round it keeps one more
    copy of the parameters. While N replicas are equal, each keeps its part.

    >>> Thermostat(target=0)
    Traceback (most recent call last):
    ValueError: target must be a number above 0, got 0
    """

    target: float = 0.28
    """What averaging gains over what time gains, at the best learning rate."""
    priors: Priors | None = None
    """What is known of ln(best learning rate / start): weight, mean and deviation of each part. None for what
    was measured, of ``find_lr`` where :class:`hdet.AutoLR` has its answer, else of a guess."""

    def __post_init__(self) -> None:
        require_number("target", self.target, above=0)
        must = "priors must be a list of (weight, mean, deviation), or None"
        is_right = is_list(self.priors) and all(is_list(p) and len(p) == 3 for p in self.priors or ())
        require_kind(must, self.priors, self.priors is None or is_right)
        for weight, mean, deviation in self.priors or ():
            require_number("weight of priors", weight, above=0)
            require_number("mean of priors", mean)
            require_number("deviation of priors", deviation, above=0)


class Reading(NamedTuple):
    """What averaging and time gain, E and P, with their standard errors. Not a number where nobody knows."""

    gain: float = math.nan
    progress: float = math.nan
    gain_error: float = math.nan
    progress_error: float = math.nan


class ThermostatState(NamedTuple):
    """Where the thermostat is."""

    log_factor: float = 0.0
    """ln of the factor on the planned schedule."""
    highest: float = 0.0
    """The highest that it was."""
    rounds: tuple[Round, ...] = ()
    reading: Reading = Reading()
    """By which the last round was judged."""


def round_ends(total_steps: int) -> list[int]:
    """Steps done when each round begins, and at the end of the last.

    >>> round_ends(1000)[:4]
    [0, 25, 50, 75]
    """
    return [round(k * total_steps / NUM_ROUNDS) for k in range(NUM_ROUNDS + 1)]


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

    Below zero the lowest loss is no measure, and both are over the fall.

    >>> rise_of([Round(k, k, 1.0, 0.0, 0.0, train) for k, train in enumerate((5.0, 1.0, 2.5))])
    (1.5, 0.375)
    """
    lowest = min(r.train for r in rounds[:-1])
    rise, fall = rounds[-1].train - lowest, rounds[0].train - lowest
    return rise / max(lowest if lowest >= 0 else fall, _TINY), rise / max(fall, _TINY)


def has_jumped(rounds: Sequence[Round]) -> bool:
    """Tell whether the training loss of the last round is well above the lowest, and the probe says so too.

    Small batches make the training loss jump by their noise. The probe is always the same data.

    >>> has_jumped([Round(k, k, 1.0, loss, loss, loss) for k, loss in enumerate((5.0, 1.0, 2.5))])
    True
    >>> has_jumped([Round(k, k, 1.0, 0.0, 0.0, train) for k, train in enumerate((5.0, 1.0, 2.5))])
    False
    """
    return min(rise_of(rounds)) > _JUMP and rounds[-1].end > min(r.end for r in rounds[:-1])


def knows_probe(rounds: Sequence[Round]) -> bool:
    """Tell whether the model knows the probe by heart, so that progress there says nothing of other data.

    >>> knows_probe([Round(k, k, 1.0, loss, loss, 5.0 - loss) for k, loss in enumerate((3.0, 2.0, 0.0))])
    False
    >>> knows_probe([Round(k, k, 1.0, loss, loss, 5.0 - k) for k, loss in enumerate((5.0, 3.0, 1.0))])
    True
    """
    seen = _later_half(rounds)
    fall = rounds[0].train - fmean(r.train for r in seen)
    return fall > 0 and fmean(r.train - r.mean for r in seen) > _BY_HEART * fall


def steered(state: ThermostatState, seen: Round, settings: Thermostat) -> ThermostatState:
    """Take a round, and move the factor.

    Where averaging gains more than it should, against time, the learning rate is too high. It falls where the
    training loss jumps, and does not rise as long as a round in sight had a loss well above its lowest. Once
    it has fallen it does not rise again, nor does it where the model knows the probe by heart. Nothing moves
    before ``FIRST`` and after ``LAST``, where time gains next to nothing any more, and where the loss has
    nearly vanished and averaging would halve the rest. A loss below zero has not vanished. With a constant it
    never does, and jumps less in proportion.
    """
    rounds = (*state.rounds, seen)
    state = state._replace(rounds=rounds, reading=Reading())
    if not FIRST <= len(rounds) <= LAST:
        return state
    if not all(abs(loss) < _HUGE and r.lr > 0 for r in rounds for loss in (r.end, r.mean, r.train)):
        return state
    read = reading_of(rounds, math.exp(state.log_factor))
    state = state._replace(reading=read)
    if has_jumped(rounds):
        return _moved(state, -MOST_PER_ROUND)
    fall = rounds[1].mean - fmean(r.mean for r in _later_half(rounds))
    if read.progress + 2 * read.progress_error < _ENDED * fall:
        return state
    gain, progress = max(read.gain, read.gain_error), max(read.progress, read.progress_error)
    if max(read.gain, read.progress) <= 0 or min(gain, progress) <= 0:
        return state
    if 0 <= seen.mean < _VANISHED * rounds[0].mean and gain > seen.mean / 2:
        return state
    noise = math.hypot(read.gain_error / gain, read.progress_error / progress)
    measured = state.log_factor - _GAIN * math.log(gain / progress / settings.target)
    wanted = posterior_mean(settings.priors or GUESS, measured, math.hypot(_ERROR, _GAIN * noise))
    step = wanted - state.log_factor
    # Where the learning rate has fallen, the loss falls with the noise, which looks like progress.
    has_fallen = state.log_factor < state.highest - _FALLEN
    rises = [rise_of(rounds[: k + 1])[0] for k in range(len(rounds) // 2 - 1, len(rounds))]
    may_rise = not has_fallen and max(rises) <= _JUMP and not knows_probe(rounds)
    return _moved(state, step if may_rise else min(0.0, step))


def _moved(state: ThermostatState, step: float) -> ThermostatState:
    step = max(-MOST_PER_ROUND, min(MOST_PER_ROUND, step))
    log_factor = max(-MOST, min(MOST, state.log_factor + step))
    return state._replace(log_factor=log_factor, highest=max(state.highest, log_factor))

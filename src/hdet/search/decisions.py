r"""The search of :func:`hdet.find_lr`: a ramp, a few short trials, and the user's own number. Pure decisions.

1. *Ramp.* The learning rate grows exponentially while the model trains, from a hundredth of the user's until
   the loss turns. The weights of the lowest loss are past the first quick gains, which say little of a run.
2. *Trials.* From those weights, a few learning rates each train through a complete miniature of the
   schedule and are scored on the same data.
3. *Answer.* What the trials say is weighed against the user's number, by what each is worth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hdet.method.recipe import one_cycle

LEAST_STEPS = 50
"""A shorter run cannot afford a search."""
_DECADES_BELOW, _DECADES = 2, 4
"""The ramp begins a factor of 100 below the user's learning rate, and reaches 100 above it in its length."""
_LONGEST = 1.5
"""If nothing has turned by then, the ramp goes on to this many times its length."""
_WINDOW = 12
"""The loss of the ramp is averaged over a twelfth of its length, a third of a decade."""
_LEARNT = 0.1
"""A loss that has fallen by this share has learnt something. Below it, trials cannot rank learning rates."""
_TURNED, _WORSE = 0.5, 0.3
"""The ramp ends when this share of its gain is lost again, or the loss is so much above the first."""
_SPAN = 30.0
"""Trials reach from the ramp's best learning rate down to this factor below: what a ramp survives for a few
steps is two to twelve times too high for a run (nine problems, five starts each)."""
_NUM_TRIALS, _FEWEST_TRIALS = 8, 4
"""Trials that are made at the same time, each on its own part of the batch. From six replicas on, each has
one; fewer split their batches. Where a batch is too small for that, there are fewer, in turns."""
_MANY_REPLICAS = 6
_RAMP_STEPS, _TRIAL_STEPS = 40, 40
"""Lengths in a run of 1000 steps. They grow with the root of its length. A ramp that does not turn goes on
for half as long again, so that both take 8 to 10 % of 1000, 3.6 to 4.5 % of 5000."""
_MOVED = 0.01
"""Share of the first loss by which a ramp has moved it."""
_MOST = 0.25
"""The search takes at most this share of a run's steps, where the best trial is the highest or the lowest and
others are tried beyond it, or where nothing has been learnt and trials of twice the length are."""
_PRIOR_NEAR, _PRIOR_FAR = math.log(2), math.log(30)
"""The user's number is taken to be right within a factor of two, or else within thirty, as one standard
deviation each, with even odds."""
_ERROR = 0.6
"""The word of the trials is weighed as if this were its standard deviation, as a logarithm. Shorter trials
know less: it goes with the root of their length."""
_BELOW, _ABOVE = 2.7, 5.8
"""In eight of ten runs on the zoo's dev problems the best learning rate of the sweep is between these factors
below and above the answer: trials favour learning rates that lower the loss quickly, which are low."""
_FARTHEST = 300.0
"""So far from the user's number an answer can be for this to hold. It was measured with numbers that are
up to 100 times off, and answers may be a few times off themselves."""


@dataclass(frozen=True)
class Lengths:
    """Steps of the ramp and of a trial, and how many trials there are."""

    ramp: int
    trial: int
    num_turns: int
    """So many trials are made one after the other in every place."""

    @property
    def most_ramp_steps(self) -> int:
        """Say where a ramp ends that has not turned."""
        return round(_LONGEST * self.ramp)


_LEAST_EXAMPLES = 4
"""Examples of a trial in a step. With one or two the gradient is so noisy that trials prefer learning rates
that are two to ten times too low. Neighbours share parts of a small batch."""


def num_parts(num_replicas: int, batch_size: int) -> int:
    """Say into how many parts a replica splits its batch, with a trial on each.

    >>> num_parts(8, 32), num_parts(2, 32), num_parts(1, 32), num_parts(1, 3)
    (1, 4, 8, 3)
    """
    if num_replicas >= _MANY_REPLICAS:
        return 1
    return max(1, min(batch_size, -(-_NUM_TRIALS // num_replicas)))


def least_examples(batch_size: int) -> int:
    """Say how many examples of the joint batch of all replicas a trial sees in a step at least.

    Never more than half of a batch: then trials have less noise than eighths of it, for which the answer is
    made. Where there are too few for eight trials, they are likely large ones, and one is enough.

    >>> least_examples(32), least_examples(8), least_examples(6)
    (4, 4, 1)
    """
    return _LEAST_EXAMPLES if batch_size >= 2 * _LEAST_EXAMPLES else 1


def lengths(total_steps: int, num_places: int) -> Lengths:
    """Say how long the search is.

    Args:
        total_steps: length of the run.
        num_places: how many trials can be made at the same time.

    >>> lengths(1000, 8)
    Lengths(ramp=40, trial=40, num_turns=1)
    >>> lengths(4000, 2)
    Lengths(ramp=80, trial=40, num_turns=2)
    """
    scale = math.sqrt(total_steps / 1000)
    num_turns = max(1, -(-_FEWEST_TRIALS // num_places))
    return Lengths(
        ramp=max(12, round(_RAMP_STEPS * scale)),
        trial=max(5, round(_TRIAL_STEPS * scale / num_turns)),
        num_turns=num_turns,
    )


def ramp_factor(step: int, num_steps: int) -> float:
    """Give the learning rate of a step of the ramp, over the user's.

    >>> [round(ramp_factor(step, 40), 3) for step in (0, 20, 40)]
    [0.01, 1.0, 100.0]
    """
    return 10 ** (_DECADES * step / num_steps - _DECADES_BELOW)


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """Holds what the ramp has seen so far."""

    num_steps: int = 0
    first: float = math.nan
    """The loss before any training."""
    mean: float = 0.0
    weight: float = 0.0
    """Running sum of losses and of their weights: the mean over the last of them is their ratio."""
    low: float = math.inf
    low_step: int = 0
    """The lowest mean, and the step before which the weights had it."""
    is_over: bool = False

    @property
    def has_learnt(self) -> bool:
        """Tell if the loss has fallen enough to rank learning rates."""
        return self.first - self.low > _LEARNT * abs(self.first)


def next_ramp(ramp: Ramp, loss: float, sizes: Lengths) -> Ramp:
    """Take the loss before a step, always on the same data: batches would add their noise.

    >>> ramp, sizes = Ramp(), lengths(1000, 8)
    >>> for loss in [4.0] * 10 + [3.0] * 10 + [2.0] * 10 + [50.0]:
    ...     ramp = next_ramp(ramp, loss, sizes)
    >>> ramp.is_over, ramp.low_step
    (True, 29)
    """
    decay = 1 - 1 / max(2, sizes.ramp / _WINDOW)
    is_finite, count = math.isfinite(loss), ramp.num_steps
    first = loss if count == 0 else ramp.first
    total = decay * ramp.mean + (1 - decay) * (loss if is_finite else 0.0)
    weight = decay * ramp.weight + (1 - decay)
    mean = total / weight
    if ramp.has_learnt:
        has_turned = mean - ramp.low > _TURNED * (first - ramp.low)
    else:
        has_turned = mean - first > _WORSE * abs(first)
    is_low = is_finite and mean < ramp.low
    return replace(
        ramp,
        num_steps=count + 1,
        first=first,
        mean=total,
        weight=weight,
        low=mean if is_low else ramp.low,
        low_step=count if is_low else ramp.low_step,
        is_over=not is_finite or has_turned or count + 1 >= sizes.most_ramp_steps,
    )


def trial_factors(lead: float, count: int) -> list[float]:
    """Spread the learning rates of the trials, as factors on the user's, below the ramp's best.

    >>> [round(f, 3) for f in trial_factors(3.0, 4)]
    [0.1, 0.311, 0.965, 3.0]
    """
    return [lead * _SPAN ** (i / (count - 1) - 1) for i in range(count)]


def trial_shape(step: int, num_steps: int) -> float:
    """Follow the miniature schedule of a trial: 20 % warm-up, then down to a hundredth of the peak."""
    return one_cycle(step, num_steps, warmup=0.2, start=1 / 25, end=0.01)


@dataclass(frozen=True)
class Trial:
    """One learning rate, as a factor on the user's, and how it did."""

    factor: float
    score: float | None
    """Loss on common data after the trial; None if it was not finite."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Holds what was found, as factors on the user's learning rate."""

    factor: float
    low: float
    high: float
    """The best learning rate of a sweep should lie between these in four cases of five."""
    evidence: float | None
    """The trials alone say this; None if they say nothing."""
    reason: str
    """It says in words how this came about."""


def next_lead(trials: Sequence[Trial], first_score: float, steps_then: int, total_steps: int) -> float | None:
    """Say how high the next trials reach if the best is at an end, so that the valley may lie beyond it.

    Where nothing has been learnt, the lowest is the best because it does the least harm. Where the highest is
    the best, the user's number is reached whatever it costs: trials that ask for more must not lower it.

    Args:
        trials: of one length.
        first_score: the score of the untrained weights.
        steps_then: how many steps the search will have taken after the next trials.
        total_steps: length of the run.

    >>> next_lead([Trial(1.0, 3.0), Trial(30.0, 2.0)], 4.0, 120, 1000)
    300.0
    >>> next_lead([Trial(1.0, 2.0), Trial(30.0, 3.0)], 4.0, 120, 1000)
    3.0
    >>> next_lead([Trial(0.02, 3.0), Trial(0.6, 2.0)], 4.0, 400, 1000)
    6.0
    """
    scores = [(math.inf if trial.score is None else trial.score, trial.factor) for trial in trials]
    lowest, highest = min(trial.factor for trial in trials), max(trial.factor for trial in trials)
    best = min(scores)[1]
    if best == highest < 1 and _has_learnt(trials, first_score):
        return 10 * highest
    if steps_then > _MOST * total_steps:
        return None
    if best == highest:
        return 10 * best
    return _SPAN / 10 * lowest if best == lowest and _has_learnt(trials, first_score) else None


def should_lengthen(trials: Sequence[Trial], first_score: float, steps_then: int, total_steps: int) -> bool:
    """Tell if nothing has been learnt yet, and steps are left for longer trials."""
    return not _has_learnt(trials, first_score) and steps_then <= _MOST * total_steps


def growth_by_age(trial_steps: int, total_steps: int) -> float:
    r"""Say how much higher the learning rate of a run must be than that of a trial if steps shrink with age.

    Adagrad divides by the root of the sum of all squared gradients, so that its steps shrink as
    :math:`1/\sqrt t`. A trial begins with an empty sum.

    .. math:: \sqrt{S / m}

    where S is the length of the run and m that of a trial.

    >>> growth_by_age(40, 1000)
    5.0
    """
    return math.sqrt(total_steps / trial_steps)


def _has_learnt(trials: Sequence[Trial], first_score: float) -> bool:
    scores = [trial.score for trial in trials if trial.score is not None]
    return bool(scores) and first_score - min(scores) > _LEARNT * abs(first_score)


def answer(
    trials: Sequence[Trial], first_score: float, *, lengthened: float = 1.0, growth: float = 1.0
) -> Answer:
    """Weigh what the trials say against the user's number.

    Args:
        trials: of the last length.
        first_score: the score of the untrained weights.
        lengthened: how many times longer than usual the trials were.
        growth: what a run needs over what a trial needs, from :func:`growth_by_age`.

    >>> trials = [Trial(1.0, 2.0), Trial(3.0, 1.5), Trial(9.0, 1.0), Trial(27.0, None)]
    >>> found = answer(trials, 3.0)
    >>> 3 < found.factor < found.evidence < 9 < found.high
    True
    """
    points = [(trial.factor, trial.score) for trial in trials if trial.score is not None]
    error = _ERROR / math.sqrt(lengthened)
    if len(points) < 2:
        return _kept("fewer than two trials had a finite loss")
    values = [score for _, score in points]
    if max(values) - min(values) <= 1e-4 * max(abs(value) for value in values):
        return _kept("the loss is the same at every learning rate")
    if min(values) >= first_score:
        return _kept("no trial learnt anything")
    evidence = growth * soft_minimum(points)
    reason = "trials, weighed against your guess"
    if not _has_learnt(trials, first_score):
        error, reason = 2 * error, "trials that learnt little, weighed against your guess"
    factor = math.exp(weigh(math.log(evidence), error))
    low, high = likely_range(factor)
    return Answer(factor=factor, low=low, high=high, evidence=evidence, reason=reason)


def likely_range(found: float) -> tuple[float, float]:
    """Say where the best learning rate of a sweep should lie in four cases of five, given what was found.

    >>> [round(end, 4) for end in likely_range(0.01)]
    [0.0037, 0.058]
    """
    return found / _BELOW, found * _ABOVE


def should_search_again(asked: float, found: float, trials: Sequence[Sequence[float | None]]) -> bool:
    """Tell if the answer lies where the search could not look well, so that its range means little.

    It is very far from the user's number, or the highest learning rate that was tried did best.

    Args:
        asked: the user's learning rate.
        found: the answer.
        trials: learning rate and score of each. None where the loss was not finite.

    >>> should_search_again(1e-5, 1e-3, [(1e-3, 2.0), (1e-2, 1.5), (1e-1, None)])
    False
    >>> should_search_again(1e-7, 1e-3, [(1e-3, 2.0), (1e-2, 1.5), (1e-1, None)])
    True
    >>> should_search_again(1e-5, 1e-3, [(1e-4, 2.0), (1e-3, 1.5)])
    True
    """
    if found == asked or not (0 < asked < math.inf and 0 < found < math.inf):
        return False  # the search could not tell, and says so
    scored = [(score, lr) for lr, score in trials if lr is not None and score is not None]
    is_highest = bool(scored) and min(scored)[1] == max(lr for lr, _ in trials if lr is not None)
    return is_highest or abs(math.log(found / asked)) > math.log(_FARTHEST)


def where_it_moves(ramp: Sequence[tuple[float, float]]) -> float | None:
    """Give the learning rate at which the loss of a ramp first moves, if it never fell.

    >>> where_it_moves([(1e-7, 2.0), (1e-6, 2.0), (1e-5, 2.1), (1e-4, 4.0)])
    1e-05
    """
    first = ramp[0][1]
    has_fallen = any(first - loss > _MOVED / 10 * abs(first) for _, loss in ramp)
    return next((lr for lr, loss in ramp if loss - first > _MOVED * abs(first) and not has_fallen), None)


def _kept(why: str) -> Answer:
    reason = f"your guess, because the search could not tell: {why}"
    band = math.exp(1.28 * _PRIOR_FAR)
    return Answer(factor=1.0, low=1 / band, high=band, evidence=None, reason=reason)


def weigh(evidence: float, error: float) -> float:
    r"""Take the mean of the posterior, in log factors on the user's learning rate.

    The prior is an even mixture of two normal distributions around zero, and the evidence is normal:

    .. math:: p(x \mid e) \propto N(e; x, s^2) \sum_k \tfrac12 N(x; 0, \tau_k^2)

    Args:
        evidence: e, what the trials say.
        error: s, its standard deviation.

    >>> near, far = weigh(0.5, 0.6), weigh(4.0, 0.6)
    >>> 0.2 < near < 0.35, 3.8 < far < 4.0
    (True, True)
    """
    weights, means = [], []
    for tau in (_PRIOR_NEAR, _PRIOR_FAR):
        total = tau**2 + error**2
        weights.append(math.exp(-(evidence**2) / (2 * total)) / math.sqrt(total))
        means.append(evidence * tau**2 / total)
    return sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)


def soft_minimum(points: Sequence[tuple[float, float]]) -> float:
    r"""Say where the lowest scores are, on a logarithmic scale.

    The mean of log factors with weights :math:`\exp(-(s_i - \min s)/\tau)`, tau the distance from the lowest
    score to that below which a third of them lie: noise moves it little, and a flat valley gives its middle.

    >>> round(soft_minimum([(0.5, 2.0), (1.0, 1.0), (2.0, 2.0)]), 6)
    1.0
    """
    scores = sorted(s for _, s in points)
    scale = scores[max(min(1, len(scores) - 1), len(scores) // 3)] - scores[0] or 1.0
    weights = [math.exp(-(s - scores[0]) / scale) for _, s in points]
    logs = [w * math.log(f) for w, (f, _) in zip(weights, points, strict=True)]
    return math.exp(math.fsum(logs) / math.fsum(weights))

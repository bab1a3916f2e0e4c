r"""Weight decay by held-out data: more of it where smaller weights would score better.

With one gradient for all, a replica that decays its weights :math:`f` times as much ends a round, to first
order, where the others do, but with its decayed weights scaled by :math:`1 - (f - 1) a`. Here :math:`a` is
the sum of learning rate times weight decay over the round. So no such replica has to be trained. The model
with smaller and with larger weights tells what more and less decay would have done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from hdet.checks import require_number
from hdet.errors import bad_argument

SCALES = (0.95, 1.05)
"""Decayed weights are multiplied by these to be scored."""
NUM_PARTS = 8
"""Parts that held-out data is scored in at least, so that the error of a score is known."""
FEW_EXAMPLES = 200
"""Fewer held-out examples than these are too noisy to steer by."""
START = 5.0
"""A strength that is good on repeated data where nothing else is known."""
_ADDED = 2.0
"""Strength that one look adds at most, where the model has learnt its training data by heart, ..."""
_GROWTH = 0.35
"""... or this share of what there is, if that is more. Weights follow slowly, within 1 / strength of the run:
faster moves overshoot."""
_MOST = 60.0
"""Strength beyond which nothing is added."""
_FIRST, _LAST = 0.2, 0.9
"""Shares of the run between which it looks. Later the learning rate is too low for a decay to matter."""
_MAY_FALL_FROM = 0.35
"""Share of the run from which decay may be taken away. Before, hardly any model overfits."""
_CLOSED_GAP = 0.25
"""A model may need less decay where (held-out loss - training loss) / held-out loss is below this."""


@dataclass(frozen=True, kw_only=True)
class HeldOutWeightDecay:
    """Move the weight decay by what held-out data says.

    Replicas stay equal, and it needs an :class:`hdet.Probe`.

    >>> HeldOutWeightDecay(interval=0.6)
    Traceback (most recent call last):
    ValueError: interval must be a number in (0, 0.5], got 0.6
    """

    interval: float = 0.05
    """Share of the run between two looks at the probe."""
    start: Literal["auto"] | None = None
    """``"auto"`` begins at 5 / (learning rate x steps), a good value on data that repeats. None begins at
    what the optimizer has."""

    def __post_init__(self) -> None:
        require_number("interval", self.interval, above=0, at_most=0.5)
        if self.start not in ("auto", None):
            is_number = isinstance(self.start, (int, float))
            remedy = (
                f"set weight_decay={self.start!r} in the optimizer" if is_number else "write start='auto'"
            )
            raise bad_argument("start", "must be 'auto' or None", repr(self.start), remedy)

    def is_due(self, share_done: float, before: float) -> bool:
        """Tell if an interval ends at a sync, where ``before`` was done of the run at the sync before it.

        >>> told = HeldOutWeightDecay(interval=0.2)
        >>> [k for k in range(1, 11) if told.is_due(k / 10, (k - 1) / 10)]
        [2, 4, 6, 8, 10]
        """
        return math.floor(share_done / self.interval + 1e-9) > math.floor(before / self.interval + 1e-9)

    def num_looks(self, num_rounds: float) -> int:
        """Count the looks in a run of so many rounds.

        >>> [HeldOutWeightDecay().num_looks(num_rounds) for num_rounds in (1, 2.5, 20, 400)]
        [0, 2, 15, 15]
        """
        num_rounds = min(num_rounds, 1000)
        shares = [k / num_rounds for k in range(math.floor(num_rounds) + 1)]
        return sum(self.is_due(share, before) for before, share in pairwise(shares) if may_look(share))


def may_look(share_done: float) -> bool:
    """Tell if this is the part of a run in which the weight decay is steered.

    >>> [may_look(share) for share in (0.1, 0.2, 0.9, 0.95)]
    [False, True, True, False]
    """
    return _FIRST <= share_done <= _LAST


class Look(NamedTuple):
    """Tells what one look at the probe has shown."""

    slope: float
    """By how much the held-out loss rises for each e-fold by which the weights shrink."""
    variance: float
    """Of the slope, by how far parts of the probe differ."""
    loss: float
    """The held-out loss."""


def look_of(low: Sequence[float], high: Sequence[float]) -> Look:
    """Turn the losses of the parts of a probe, with smaller and with larger weights, into a slope.

    >>> look = look_of([1.0, 1.2], [0.9, 1.1])
    >>> round(look.slope, 2), round(look.variance, 9), round(look.loss, 9)
    (1.0, 0.0, 1.05)
    """
    width = math.log(SCALES[1] / SCALES[0])
    slopes = [(a - b) / width for a, b in zip(low, high, strict=True)]
    mean, count = math.fsum(slopes) / len(slopes), len(slopes)
    scatter = math.fsum((slope - mean) ** 2 for slope in slopes) / max(1, count - 1)
    return Look(mean, scatter / count, math.fsum([*low, *high]) / (2 * count))


def joined_look(looks: Sequence[Look]) -> Look:
    """One look out of those of several processes, which have the same data or each a part of it.

    >>> joined_look([Look(1.0, 0.5, 2.0), Look(2.0, 0.5, 4.0)])
    Look(slope=1.5, variance=0.25, loss=3.0)
    >>> joined_look([Look(1.0, 0.5, 2.0), Look(1.0, 0.5, 2.0)])
    Look(slope=1.0, variance=0.5, loss=2.0)
    """
    slope, variance, loss = (math.fsum(one) / len(looks) for one in zip(*looks, strict=True))
    has_parts = any(abs(look.loss - loss) > 1e-5 * abs(loss) for look in looks)
    return Look(slope, variance / len(looks) if has_parts else variance, loss)


class DecayState(NamedTuple):
    """Holds what the controller knows of the weight decay."""

    strength: float
    """Weight decay times peak learning rate times steps: how often weights would decay by e in the run."""
    slope: float = 0.0
    """Of the last look, ..."""
    variance: float = 0.0
    """... and its variance."""
    gap: float = 0.0
    """Share of the held-out loss that the training loss has not, over the last looks."""
    num_looks: float = 0.0


def moved(
    state: DecayState, look: Look, *, training_loss: float, share_done: float, least: float
) -> DecayState:
    r"""Take in one look at the probe, and move the strength :math:`\lambda` once.

    With the slope :math:`g` of the held-out loss on shrinking weights and its error :math:`\sigma`, a look is
    sure by :math:`\mathrm{erf}(|g| / \sqrt 2 \sigma)`. Weights that are still noisy give slopes of either
    sign, so two looks must agree: :math:`c` is the product over this look and the one before, and zero where
    their signs differ.

    .. math:: \lambda' = \begin{cases}
        \lambda + c \cdot \text{gap} \cdot \max(2,\ 0.35 \lambda) & g < 0 \\
        \lambda\, 2^{-c (1 - \text{gap} / 0.25)} & g > 0,\ \text{gap} < 0.25 \\
        \lambda & \text{else}
    \end{cases}

    Where smaller weights would score better, decay is added, the more the further the held-out loss is above
    the training loss. Where larger ones would, that alone says little: weights of a good size lose by
    shrinking, too. Decay is taken away only where the model does not overfit.

    The gap takes zero for the best loss that there is. A constant in the loss makes it smaller. Below zero
    nobody can tell it, and nothing moves.

    Args:
        state: before the look.
        look: at the probe.
        training_loss: the mean since the last look.
        share_done: of the run. Decay is taken away in its later part only.
        least: the strength never falls below this one.

    >>> told = {"training_loss": 0.5, "least": 0.1}
    >>> more = Look(-1.0, 0.01, 1.0)
    >>> first = moved(DecayState(0.1), more, share_done=0.4, **told)
    >>> second = moved(first, more, share_done=0.45, **told)
    >>> first.strength, round(second.strength, 3), second.gap
    (0.1, 1.1, 0.5)
    >>> moved(second, Look(5.0, 0.01, 1.0), share_done=0.5, **told).strength == second.strength
    True
    """
    seen = (look.loss - training_loss) / abs(look.loss) if look.loss else 0.0
    gap = (state.gap + seen) / 2 if state.num_looks else seen
    agree = state.num_looks > 0 and look.slope * state.slope > 0 and min(look.loss, training_loss) >= 0
    sure = confidence(look.slope, look.variance) * confidence(state.slope, state.variance) if agree else 0.0
    strength = state.strength
    if look.slope < 0:
        added = sure * min(1.0, max(0.0, gap)) * max(_ADDED, _GROWTH * strength)
        strength = max(strength, min(strength + added, _MOST))
    elif share_done >= _MAY_FALL_FROM and gap < _CLOSED_GAP:
        halvings = sure * min(1.0, 1 - gap / _CLOSED_GAP)
        strength = min(strength, max(strength / 2**halvings, least))
    return DecayState(strength, look.slope, look.variance, gap, state.num_looks + 1)


def confidence(slope: float, variance: float) -> float:
    """Tell how sure the sign of a slope is, from 0 to 1.

    >>> confidence(1.0, 0.0), round(confidence(-1.0, 1.0), 3), confidence(0.0, 1.0)
    (1.0, 0.683, 0.0)
    """
    return math.erf(abs(slope) / math.sqrt(2 * variance)) if variance > 0 else float(slope != 0)


def least_strength(start: float) -> float:
    """Give the strength below which a run that starts with this one never falls.

    >>> least_strength(0.1), least_strength(40.0)
    (0.1, 5.0)
    """
    return min(start, START)

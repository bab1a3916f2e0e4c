"""The guard: notice that a run has lost what it had learnt, so that it can go back. Pure decisions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from hdet.checks import require_count, require_flag, require_number

_LEARNT = 0.1
"""Where the loss has fallen by less than this share, nobody can say that something was lost."""
_WORSE = 0.3
"""Then only a loss so much above the first is a collapse."""
_CLEAR = 5.0
"""Standard deviations of a round's loss that a collapse must be clear of."""
_MIN_ROUNDS = 5
"""Rounds that are needed to know the noise."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Go back, with a lower learning rate, where a run loses what it had learnt.

    A learning rate can be good for most of a run and kill the network at its peak: the loss jumps back to
    that of an untrained model and stays there. The guard looks at the training loss of every round. After
    ``patience`` rounds in which more than ``lost`` of all that was gained is gone, clear of the noise, it
    puts the weights back to where they were some rounds before, lets the optimizer begin again without its
    moments, and divides the learning rate by ``factor`` for good.

    It keeps three copies of the parameters, the first weights and two later ones. While N replicas are equal,
    each keeps its part of them, 3/N. A checkpoint holds them too. It needs the loss in ``step(loss)``.

    >>> Guard(lost=0)
    Traceback (most recent call last):
    ValueError: lost must be a number above 0, got 0
    """

    lost: float = 0.5
    """Share of the gain whose loss is a collapse."""
    patience: int = 2
    """Rounds in a row that make a collapse. A loss that only jumps comes back by itself."""
    factor: float = 3.0
    """By how much the learning rate falls then: the best one is well below what kills a network."""
    expected_loss: float | None = None
    """A training loss that a run should have reached after 15 % of its steps, by what trials have shown. From
    then on it is a collapse to be above it, and clear above the lowest so far."""
    interval: float = 0.02
    """Share of the run between two copies."""
    copy_on_cpu: bool = False
    """Keep the copies in host memory."""
    saves_copies: bool = True
    """Save the copies in a checkpoint, so that a resumed run goes back as it would have. Without them the
    file is smaller, and a resumed run that would go back beyond its checkpoint ends with an error."""

    def __post_init__(self) -> None:
        require_number("lost", self.lost, above=0)
        require_count("patience", self.patience)
        require_number("factor", self.factor, above=1)
        if self.expected_loss is not None:
            require_number("expected_loss", self.expected_loss)
        require_number("interval", self.interval, above=0, below=1)
        require_flag("copy_on_cpu", self.copy_on_cpu)
        require_flag("saves_copies", self.saves_copies)


class GuardMemory(NamedTuple):
    """Holds what is remembered from round to round."""

    first: float = math.nan
    """Mean loss of the first round."""
    level: float = math.nan
    """Running mean over good rounds."""
    lowest: float = math.inf
    """Of the running mean."""
    last: float = math.nan
    """Loss of the last good round."""
    variance: float = 0.0
    """Of a round's loss, by the differences of neighbours."""
    num_good: int = 0
    num_bad: int = 0
    """Rounds in a row that were far above the lowest."""

    @property
    def is_well(self) -> bool:
        """Tell whether the last round was near the lowest: then the weights are worth a copy."""
        return self.num_bad == 0 and self.last <= self.lowest + 0.2 * (self.first - self.lowest)


def watch(memory: GuardMemory, loss: float, guard: Guard, *, must_have_learnt: bool = False) -> GuardMemory:
    """Take the mean loss of a round. The run has collapsed when ``num_bad`` reaches the guard's patience.

    Args:
        memory: what was remembered.
        loss: of the round.
        guard: the settings.
        must_have_learnt: whether the loss must be below the expected one by now.

    >>> memory = GuardMemory()
    >>> for loss in (4.0, 3.5, 3.0, 2.6, 2.4, 2.2, 2.1, 2.0, 2.0, 2.1, 2.0, 2.1, 3.9, 3.9):
    ...     memory = watch(memory, loss, Guard())
    >>> memory.num_bad, round(memory.lowest, 1)
    (2, 2.1)
    """
    if memory.num_good == 0:
        return GuardMemory(first=loss, level=loss, lowest=loss, last=loss, num_good=1)
    first, lowest, count = memory.first, memory.lowest, memory.num_good - 1
    gain = first - lowest
    has_learnt = gain > _LEARNT * abs(first)
    noise = math.sqrt(memory.variance / (1 - 0.9**count)) if count >= _MIN_ROUNDS else math.inf
    clear = _CLEAR * noise
    limit = lowest + max(guard.lost * gain, clear) if has_learnt else first + max(_WORSE * abs(first), clear)
    if must_have_learnt and guard.expected_loss is not None:
        limit = min(limit, max(guard.expected_loss, lowest + clear))
    if loss > limit:
        return memory._replace(num_bad=memory.num_bad + 1)
    level = 0.7 * memory.level + 0.3 * loss
    lowest, variance = min(lowest, level), 0.9 * memory.variance + 0.1 * (loss - memory.last) ** 2 / 2
    return GuardMemory(first, level, lowest, loss, variance, memory.num_good + 1)

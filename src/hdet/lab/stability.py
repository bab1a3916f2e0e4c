"""Stability: whether the loss of a run jumped, and whether the run crashed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 10
"""Steps whose mean loss is looked at."""
SPIKE, UNRECOVERED = 0.3, 0.2
"""Rises above the lowest mean, as shares of it."""
LOST = 0.5
"""Less than this share of the gain of the best run is none."""
NOISE = 0.05
"""The least rise that counts, as a share of the first loss: near zero chance alone doubles a mean."""


@dataclass(frozen=True)
class Stability:
    """What became of a run."""

    has_spike: bool
    """Whether the loss rose, for good or for a while; a crash counts."""
    crash: str
    """Why it is a crash; empty if it is none."""


def window_means(losses: Sequence[float], width: int = WINDOW) -> list[float]:
    """Means of every ``width`` steps; what is left over at the end counts in the last one.

    >>> window_means([1.0, 3.0, 5.0, 5.0, 8.0], 2)
    [2.0, 6.0]
    """
    starts = range(0, max(1, len(losses) - width + 1), width)
    ends = [*starts[1:], len(losses)]
    return [math.fsum(losses[a:b]) / (b - a) for a, b in zip(starts, ends, strict=True)]


def judge(
    losses: Sequence[float],
    *,
    num_warmup_steps: int,
    final_loss: float,
    untrained_loss: float,
    first_loss: float | None = None,
) -> Stability:
    """Judge a run by its training losses, one per step, and its held-out loss at the end.

    Args:
        losses: of every step that was made.
        num_warmup_steps: windows that begin earlier cannot be spikes, but can be the lowest.
        final_loss: held-out loss of the trained model.
        untrained_loss: held-out loss of the model as it was built.
        first_loss: what chance is measured by; None for the loss of the first step. A run from a checkpoint
            begins near its end, where that would be too small.

    >>> steady, broken = [2.0] * 10 + [1.0] * 20, [2.0] * 10 + [1.0] * 10 + [1.4] * 10
    >>> judge(steady, num_warmup_steps=5, final_loss=1.0, untrained_loss=2.0)
    Stability(has_spike=False, crash='')
    >>> judge(broken, num_warmup_steps=5, final_loss=1.4, untrained_loss=2.0)
    Stability(has_spike=True, crash='a spike that it did not recover from')
    """
    if not losses or not all(map(math.isfinite, [*losses, final_loss])):
        return Stability(True, "a loss that is not finite")
    if final_loss > untrained_loss:
        return Stability(True, "a final loss above the untrained model's")
    means = window_means(losses)
    noise = NOISE * abs(losses[0] if first_loss is None else first_loss)
    lowest, has_spike = means[0], False
    for i, mean in enumerate(means[1:], start=1):
        is_risen = mean - lowest > max(SPIKE * abs(lowest), noise)
        has_spike = has_spike or (is_risen and i * WINDOW >= num_warmup_steps)
        lowest = min(lowest, mean)
    is_lost = means[-1] - lowest > max(UNRECOVERED * abs(lowest), noise)
    return Stability(has_spike, "a spike that it did not recover from" if has_spike and is_lost else "")


def is_lost(final_loss: float, *, untrained_loss: float, best_loss: float) -> bool:
    """Tell whether a run has less than half of the gain that the best plain learning rate has.

    Too small a learning rate does that too; above the best one it is a network that died without a spike.

    >>> is_lost(1.4, untrained_loss=2.0, best_loss=1.0), is_lost(1.6, untrained_loss=2.0, best_loss=1.0)
    (False, True)
    """
    return untrained_loss - final_loss < LOST * (untrained_loss - best_loss)

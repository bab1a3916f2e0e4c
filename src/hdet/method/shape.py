"""The shape of a learning-rate schedule: a factor on the peak, as a function of the step."""

from __future__ import annotations

import math
from typing import Literal

Anneal = Literal["linear", "cosine", "none"]


def one_cycle(
    step: int,
    total_steps: int,
    *,
    warmup: float = 0.1,
    start: float = 1 / 25,
    end: float = 0.0,
    anneal: Anneal = "linear",
) -> float:
    """Factor on the peak for this step: a linear rise from ``start`` to one, then an anneal to ``end``.

    Args:
        step: from 0 to ``total_steps - 1``; later steps stay at ``end``.
        total_steps: length of the schedule.
        warmup: share of the steps in which the factor rises.
        start: factor of the first step.
        end: factor after the last step.
        anneal: ``"linear"``, ``"cosine"``, or ``"none"`` to stay at one.

    >>> [round(one_cycle(t, 10, warmup=0.2, start=0.5), 3) for t in (0, 1, 2, 6, 9, 10)]
    [0.5, 0.75, 1.0, 0.5, 0.125, 0.0]
    """
    rise = round(warmup * total_steps)
    if step < rise:
        return start + (1 - start) * step / rise
    if anneal == "none":
        return 1.0
    share = min(1.0, (step - rise) / max(1, total_steps - rise))
    if anneal == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return 1 - (1 - end) * share

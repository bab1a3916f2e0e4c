"""The tail of a run: the last steps, whose weights are averaged over time."""

from __future__ import annotations

from hdet.checks import require_count, require_number

_NUM_SAMPLES = 64
"""Steps of a long tail that are at least averaged: neighbours tell much the same, and each has a price."""


def tail_steps(total_steps: int, share: float) -> range:
    """The steps after which the weights are taken into the mean; the last one is among them.

    Args:
        total_steps: length of the run.
        share: of the run, how much of its end, rounded to at least one step; 0 for no tail.

    >>> list(tail_steps(100, 0.05))
    [96, 97, 98, 99, 100]
    >>> steps = tail_steps(10_000, 0.075)
    >>> steps[0], steps[-1], len(steps)
    (9263, 10000, 68)
    """
    require_count("total_steps", total_steps)
    if require_number("share", share, at_least=0, at_most=1) == 0:
        return range(0)
    length = max(1, round(share * total_steps))
    interval = max(1, length // _NUM_SAMPLES)
    return range(total_steps - (length // interval - 1) * interval, total_steps + 1, interval)

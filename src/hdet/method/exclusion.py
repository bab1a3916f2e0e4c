"""Exclusion: which replicas are left out because they disagree, or have lost what the others have."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

_FAR = 0.3
"""A loss must be so far above the median: in nats, or as a share of the median where that is above one."""
_CLEAR = 6.0
"""And how many times the median deviation, which is about two thirds of a standard deviation."""


def outliers(losses: Sequence[float | None]) -> set[int]:
    r"""The replicas whose loss is far above that of the others.

    .. math:: L_r > \tilde L + \max(0.3,\ 0.3\,|\tilde L|,\ 6\, \mathrm{median}_s |L_s - \tilde L|)

    :math:`\tilde L` is the median of those that have a loss. Fewer than three cannot tell who is wrong.

    >>> outliers([2.0, 2.1, None, 1.9, 4.0])
    {4}
    >>> outliers([2.0, 4.0])
    set()
    """
    known = [loss for loss in losses if loss is not None]
    if len(known) < 3:
        return set()
    median = statistics.median(known)
    deviation = statistics.median(abs(loss - median) for loss in known)
    limit = median + max(_FAR, _FAR * abs(median), _CLEAR * deviation)
    return {r for r, loss in enumerate(losses) if loss is not None and loss > limit}


def largest_agreement(marks: Sequence[float | None]) -> list[int] | None:
    """The replicas that share the most common mark; None where no mark is more common than all others.

    Args:
        marks: one for each replica, such as a checksum. None for a replica that has no say.

    >>> largest_agreement([7, 7, 9, 7])
    [0, 1, 3]
    >>> largest_agreement([7, None])
    [0]
    >>> largest_agreement([7, 9]), largest_agreement([None, None])
    (None, None)
    """
    holders: dict[float, list[int]] = {}
    for replica, mark in enumerate(marks):
        if mark is not None:
            holders.setdefault(mark, []).append(replica)
    most = max(map(len, holders.values()), default=0)
    largest = [group for group in holders.values() if len(group) == most]
    return largest[0] if len(largest) == 1 else None

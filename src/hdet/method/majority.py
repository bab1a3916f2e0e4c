"""Which replicas agree."""

from __future__ import annotations

from collections.abc import Sequence


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

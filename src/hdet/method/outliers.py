"""Outliers: replicas that train, but have lost what the others have."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

_FAR = 0.3
"""How far above the median a loss must be: in nats, or as a share of the median where that is above one."""
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

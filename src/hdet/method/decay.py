"""Decay: how much the controller of the paper lowers the base each round."""

from __future__ import annotations

import math


def equation8(div_factor: float, final_div_factor: float, num_rounds: float) -> float:
    r"""The decay as printed (paper, eq. 8).

    .. math:: \gamma = 1 - \exp\left(-\frac{\log(f_{div}/f_{final})}{K}\right)

    At torch's defaults (25 and 1e4) the logarithm is negative, so :math:`\gamma < 0` and the base
    *grows*, by :math:`f_{final}/f_{div} = 400` over the run. Kept for comparison only.

    >>> round((1 - equation8(25.0, 1e4, 10)) ** 10, 6)
    400.0
    """
    return 1 - math.exp(-math.log(div_factor / final_div_factor) / num_rounds)


def floor_matching(start: float, floor: float, num_rounds: float) -> float:
    r"""The decay that takes the base from ``start`` to ``floor`` in ``num_rounds`` rounds.

    .. math:: \gamma = 1 - (\text{floor}/\text{start})^{1/K}

    This is what the paper says of eq. 8 in words. For a one-cycle schedule the floor is
    max_lr / (div_factor * final_div_factor).

    >>> gamma = floor_matching(start=1.0, floor=0.01, num_rounds=2)
    >>> round((1 - gamma) ** 2, 12)
    0.01
    """
    return 1 - (floor / start) ** (1 / num_rounds)


def first_controlled_sync(start: int, sync_every: int) -> int:
    """The first sync at or after step ``start``; there is none at step 0.

    >>> first_controlled_sync(0, 10), first_controlled_sync(20, 10), first_controlled_sync(21, 10)
    (10, 20, 30)
    """
    return max(1, -(-start // sync_every)) * sync_every


def num_controlled_rounds(start: int, sync_every: int, total_steps: int) -> int:
    """How many rounds train on a base that the controller has set.

    It is the paper's K = (S - S_warm) / T where those divide, and counts whole rounds where they do
    not. Zero or less means that the controller would never act.

    >>> num_controlled_rounds(20, 10, 100), num_controlled_rounds(25, 10, 95)
    (8, 7)
    """
    return -(-(total_steps - first_controlled_sync(start, sync_every)) // sync_every)

"""Multipliers: how far each replica's value lies from the base."""

from __future__ import annotations

import math


def multipliers(num_replicas: int, spread: float, scale: str = "linear") -> list[float]:
    r"""Evenly spaced factors with mean one (paper, eq. 1), or even in the logarithm.

    .. math:: \rho_r = 1 + \alpha\,\frac{r - (N-1)/2}{\delta},
              \qquad \delta = \max\left(\tfrac{N-1}{2},\ 0.5\right)

    ``num_replicas`` is :math:`N` and ``spread`` is :math:`\alpha`.

    >>> multipliers(3, 0.5)
    [0.5, 1.0, 1.5]
    >>> multipliers(3, 3.0, scale="log")
    [0.25, 1.0, 4.0]
    >>> multipliers(1, 0.5)
    [1.0]
    """
    return [multiplier_at(position, spread, scale) for position in positions(num_replicas)]


def positions(num_replicas: int) -> list[float]:
    r"""Where the replicas stand in the spread, from -1 to 1: :math:`x_r = (r - (N-1)/2)/\delta`.

    >>> positions(3), positions(1)
    ([-1.0, 0.0, 1.0], [0.0])
    """
    center = (num_replicas - 1) / 2
    return [(r - center) / max(center, 0.5) for r in range(num_replicas)]


def multiplier_at(position: float, spread: float, scale: str = "linear") -> float:
    r"""The factor at a position :math:`x`: :math:`1 + \alpha x` (eq. 1), or :math:`(1 + \alpha)^x`.

    >>> multiplier_at(-1.0, 0.5), multiplier_at(1.0, 0.5, scale="log")
    (0.5, 1.5)
    """
    return 1 + spread * position if scale == "linear" else (1 + spread) ** position


def usable_share(base: float, low: float, high: float, spread: float, scale: str = "linear") -> float:
    """How much of the spread fits between the bounds, from 0 to 1, when it is narrowed on both sides alike.

    Cutting or folding single values at a bound would shift their mean away from the base.

    >>> usable_share(0.4, 0.0, 0.5, spread=0.5)
    0.5
    >>> usable_share(0.5, 0.0, 0.5, spread=0.5)
    0.0
    """
    if spread == 0 or base <= 0:
        return 0.0
    if scale == "linear":
        room = min(high / base - 1, 1 - low / base)
        return max(0.0, min(1.0, room / spread))
    room = min(math.log(high / base), math.log(base / low) if low > 0 else math.inf)
    return max(0.0, min(1.0, room / math.log(1 + spread)))


def factor_limits(
    base: float, low: float, high: float, spread: float, scale: str = "linear"
) -> tuple[float, float]:
    """By which factors the base may move so that a quarter of its spread still fits between the bounds.

    At a bound itself nothing could be explored any more, and the base would stay there for good.

    >>> factor_limits(0.2, 0.0, 0.5, spread=1.0)
    (0.0, 2.0)
    """
    return (
        low / multiplier_at(-0.25, spread, scale) / base,
        high / multiplier_at(0.25, spread, scale) / base,
    )

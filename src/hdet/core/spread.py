"""Multipliers: how far each replica's value lies from the base."""

from __future__ import annotations

__all__ = ["geometric_multipliers", "multipliers"]


def multipliers(num_replicas: int, spread: float) -> list[float]:
    r"""Evenly spaced factors with mean one (paper, eq. 1).

    .. math:: \rho_r = 1 + \alpha\,\frac{r - (N-1)/2}{\delta},
              \qquad \delta = \max\left(\tfrac{N-1}{2},\ 0.5\right)

    ``num_replicas`` is :math:`N` and ``spread`` is :math:`\alpha`.

    >>> multipliers(3, 0.5)
    [0.5, 1.0, 1.5]
    >>> multipliers(1, 0.5)
    [1.0]
    """
    center = (num_replicas - 1) / 2
    delta = max(center, 0.5)
    return [1 + spread * (r - center) / delta for r in range(num_replicas)]


def geometric_multipliers(num_replicas: int, span: float) -> list[float]:
    r"""Factors evenly spaced in the logarithm, from 1/span to span.

    .. math:: \rho_r = \text{span}^{(2r-(N-1))/(N-1)}

    Their geometric mean is one; their mean is not.

    >>> geometric_multipliers(3, 4.0)
    [0.25, 1.0, 4.0]
    >>> geometric_multipliers(1, 4.0)
    [1.0]
    """
    last = num_replicas - 1
    return [span ** ((2 * r - last) / max(last, 1)) for r in range(num_replicas)]

"""Signal: from the replicas' losses to a direction for the base."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["auto_temperature", "correlation_signal", "softmax_weights", "weighted_deviation"]


def softmax_weights(losses: Sequence[float], temperature: float) -> list[float]:
    r"""Weights of the replicas, larger where the loss is lower (paper, eq. 4).

    .. math:: w_r = \frac{\exp(s_r)}{\sum_{r'} \exp(s_{r'})}, \qquad
              s_r = \frac{\bar L - L_r}{\sigma}

    ``temperature`` is :math:`\sigma`. At zero all weights are equal: it stands for "no spread of
    losses to compare", see :func:`auto_temperature`.

    >>> softmax_weights([1.0, 1.0], 0.1)
    [0.5, 0.5]
    >>> [round(w, 3) for w in softmax_weights([1.0, 1.1], 0.1)]
    [0.731, 0.269]
    """
    if temperature == 0:
        return [1 / len(losses)] * len(losses)
    mean = math.fsum(losses) / len(losses)
    scores = [(mean - loss) / temperature for loss in losses]
    highest = max(scores)  # subtracted so that exp cannot overflow; it cancels in the ratio
    exponentials = [math.exp(score - highest) for score in scores]
    total = math.fsum(exponentials)
    return [e / total for e in exponentials]


def auto_temperature(losses: Sequence[float]) -> float:
    r"""The standard deviation of the replicas' losses, as temperature.

    It makes the weights independent of the unit of the loss; a fixed temperature is near-uniform for
    a loss whose replicas differ by far less than it, and winner-takes-all for one that differs by more.

    >>> auto_temperature([1.0, 3.0])
    1.0
    """
    mean = math.fsum(losses) / len(losses)
    return math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses) / len(losses))


def weighted_deviation(weights: Sequence[float], values: Sequence[float]) -> float:
    r"""The signal of the paper: how far the weighted mean lies from the plain one (eqs. 5-6).

    .. math:: \Delta = \sum_r w_r \eta_r - \frac{1}{N} \sum_r \eta_r

    >>> weighted_deviation([0.75, 0.25], [1.0, 3.0])
    -0.5
    """
    weighted = math.fsum(w * value for w, value in zip(weights, values, strict=True))
    return weighted - math.fsum(values) / len(values)


def correlation_signal(log_multipliers: Sequence[float], losses: Sequence[float]) -> float:
    r"""Normalised downhill slope of the loss on the log of the value, in [-1, 1].

    .. math:: z = -\frac{\sum_r (x_r - \bar x)(L_r - \bar L)}
                        {\sqrt{\sum_r (x_r - \bar x)^2 \sum_r (L_r - \bar L)^2}}

    with :math:`x_r = \log \rho_r`. It is the least-squares slope in units of the two standard
    deviations, so it depends on neither the unit of the loss nor the width of the spread. It is zero
    where there is nothing to compare.

    >>> correlation_signal([-1.0, 0.0, 1.0], [3.0, 2.0, 1.0])
    1.0
    >>> correlation_signal([-1.0, 1.0], [2.0, 2.0])
    0.0
    """
    num = len(losses)
    x_mean, loss_mean = math.fsum(log_multipliers) / num, math.fsum(losses) / num
    dx = [x - x_mean for x in log_multipliers]
    dl = [loss - loss_mean for loss in losses]
    scale = math.sqrt(math.fsum(x * x for x in dx) * math.fsum(d * d for d in dl))
    if scale == 0:
        return 0.0
    slope = math.fsum(x * d for x, d in zip(dx, dl, strict=True)) / scale
    return min(1.0, max(-1.0, -slope))

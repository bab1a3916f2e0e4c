"""Signal: from the replicas' losses to a direction for the base."""

from __future__ import annotations

import math
from collections.abc import Sequence


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


def joint_signals(positions: Sequence[Sequence[float]], losses: Sequence[float]) -> list[float]:
    r"""Normalised downhill slope of the loss on every hyperparameter at once, each in [-1, 1].

    The least-squares fit :math:`L_r \approx c + \sum_j b_j x_{jr}` over the replicas r, then

    .. math:: z_j = -b_j\,\frac{\mathrm{sd}(x_j)}{\mathrm{sd}(L)}

    ``positions[j][r]`` is :math:`x_{jr}`, where replica r stands in the spread of hyperparameter j. With
    one hyperparameter this is the negative correlation. With several, one's effect is not credited to
    another that happened to be assigned alike. The unit of the loss and the width of the spread cancel.

    >>> [round(z, 6) for z in joint_signals([[-1.0, 0.0, 1.0]], [3.0, 2.0, 1.0])]
    [1.0]
    >>> joint_signals([[-1.0, 1.0]], [2.0, 2.0])
    [0.0]

    The loss depends on the first only; the second is correlated with it by chance:

    >>> z = joint_signals([[-1.0, -1.0, 1.0, 1.0], [-1.0, 1.0, 0.5, 1.0]], [2.0, 2.0, 1.0, 1.0])
    >>> [abs(round(x, 2)) for x in z]
    [1.0, 0.0]
    """
    columns = [_centered(x) for x in positions]
    centered_losses = _centered(losses)
    loss_scale = math.sqrt(_dot(centered_losses, centered_losses))
    if loss_scale == 0:
        return [0.0] * len(columns)
    # Columns of unit length make the coefficients those of the normalised slope. A small ridge settles
    # what the replicas cannot tell apart: it shares the effect among equal columns.
    ridge = 1e-3
    lengths = [math.sqrt(_dot(x, x)) for x in columns]
    units = [[v / length if length else 0.0 for v in x] for x, length in zip(columns, lengths, strict=True)]
    gram = [[_dot(a, b) + ridge * (i == j) for j, b in enumerate(units)] for i, a in enumerate(units)]
    slopes = _solve(gram, [_dot(x, centered_losses) / loss_scale for x in units])
    return [min(1.0, max(-1.0, -slope * (1 + ridge))) for slope in slopes]


def _centered(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Gaussian elimination; the matrix is symmetric and positive definite."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [b - factor * a for a, b in zip(rows[i], rows[j], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = math.fsum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution

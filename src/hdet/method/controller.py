"""The controller: from the replicas' losses to a move of the shared value (eqs. 4-8, and our form)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hdet.checks import require_choice, require_count, require_number, require_number_or_choice
from hdet.errors import bad_argument
from hdet.method.fan_out import dot


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
    loss_scale = math.sqrt(dot(centered_losses, centered_losses))
    if loss_scale == 0:
        return [0.0] * len(columns)
    # Columns of unit length make the coefficients those of the normalised slope. A small ridge settles
    # what the replicas cannot tell apart: it shares the effect among equal columns.
    ridge = 1e-3
    lengths = [math.sqrt(dot(x, x)) for x in columns]
    units = [[v / length if length else 0.0 for v in x] for x, length in zip(columns, lengths, strict=True)]
    gram = [[dot(a, b) + ridge * (i == j) for j, b in enumerate(units)] for i, a in enumerate(units)]
    slopes = _solve(gram, [dot(x, centered_losses) / loss_scale for x in units])
    return [min(1.0, max(-1.0, -slope * (1 + ridge))) for slope in slopes]


def _centered(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


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


def decay_to(end: float, num_rounds: float) -> float:
    r"""The decay that takes the base to a share of itself in so many rounds (paper, eq. 8).

    .. math:: \gamma = 1 - \exp\left(-\frac{\log(f_{div}/f_{final})}{K}\right) = 1 - \text{end}^{1/K},
              \qquad \text{end} = f_{final} / f_{div}

    The paper says that it matches the floor of OneCycleLR, and not what :math:`f_{final}` is. As the final
    *fraction*, 1e-4 at torch's defaults, it does: from the peak it ends at max_lr / (25 * 1e4). As torch's
    ``final_div_factor``, 1e4, it makes the base *grow*, 400-fold.

    >>> round(decay_to(end=0.25, num_rounds=2), 12)
    0.5
    >>> final_fraction, final_div_factor, div_factor = 1e-4, 1e4, 25
    >>> round((1 - decay_to(final_fraction / div_factor, 10)) ** 10 * (25 * 1e4), 9)
    1.0
    >>> round((1 - decay_to(final_div_factor / div_factor, 10)) ** 10, 6)
    400.0
    """
    return 1 - end ** (1 / num_rounds)


def first_controlled_sync(start: int, sync_every: int) -> int:
    """The first sync at or after step ``start``; there is none at step 0.

    >>> first_controlled_sync(0, 10), first_controlled_sync(20, 10), first_controlled_sync(21, 10)
    (10, 20, 30)
    """
    return max(1, -(-start // sync_every)) * sync_every


def num_controlled_rounds(start: int, sync_every: int, total_steps: int) -> int:
    """Count the rounds that train on a base that the controller has set.

    It is the paper's K = (S - S_warm) / T where those divide, and counts whole rounds where they do
    not. Zero or less means that the controller would never act.

    >>> num_controlled_rounds(20, 10, 100), num_controlled_rounds(25, 10, 95)
    (8, 7)
    """
    return -(-(total_steps - first_controlled_sync(start, sync_every)) // sync_every)


def num_fixed_rounds(controller: Controller | None, sync_every: int) -> float:
    """Count the rounds before the first move of a controller; without one there is no end of them.

    >>> num_fixed_rounds(Controller(start=21), 10), num_fixed_rounds(None, 10)
    (3.0, inf)
    """
    return first_controlled_sync(controller.start, sync_every) / sync_every if controller else math.inf


@dataclass(frozen=True, kw_only=True)
class Controller:
    """Settings of the controller; :class:`hdet.Ensemble` runs it at every sync.

    >>> Controller(form="log", momentum=0.5).step_size
    0.5
    >>> Controller(momentum=1.0)
    Traceback (most recent call last):
    ValueError: momentum must be a number in [0, 1), got 1.0
    """

    form: Literal["paper", "log"] = "log"
    """``"paper"`` holds the base between syncs and moves it by eq. 7. ``"log"`` lets the planned
    schedule go on and learns a correction that multiplies it."""

    start: int = 0
    """Step from which the controller acts (S_warm); it acts at syncs only."""

    step_size: float = 0.5
    """Says how far the velocity moves the base. In the log form: the fraction of the explored range
    (log of the widest multiplier) that the base may cross in one round."""

    momentum: float = 0.9
    """Share of the old velocity that is kept each round."""

    temperature: float | Literal["auto"] = "auto"
    """Softness of the replicas' weights (eq. 4); ``"auto"`` is the spread of their losses.
    The paper states 0.1, its code uses 0.002. The log form does not use it."""

    end: float | Literal["floor"] = 1.0
    """Share of the base at ``start`` where the decay ends, by equal factors (paper form). It needs
    ``total_steps``, unless it is 1: no decay. ``"floor"`` ends at the floor of each hyperparameter."""

    max_correction: float = 100.0
    """The log form keeps its correction between 1 / max_correction and max_correction."""

    def __post_init__(self) -> None:
        require_choice("form", self.form, ("paper", "log"))
        require_count("start", self.start, at_least=0)
        require_number("step_size", self.step_size, above=0)
        require_number("momentum", self.momentum, at_least=0, below=1)
        require_number_or_choice("temperature", self.temperature, ("auto",), above=0)
        require_number_or_choice("end", self.end, ("floor",), above=0)
        require_number("max_correction", self.max_correction, at_least=1)
        if self.form == "log" and self.end != 1.0:
            remedy = (
                "there the planned schedule goes on and brings its own decay; use form='paper' to replace "
                "the schedule by a decay"
            )
            raise bad_argument("end", "must be 1 for form='log'", repr(self.end), remedy)
        if self.form == "log" and self.step_size > 1:
            remedy = "larger steps would leave the range that the replicas explored"
            raise bad_argument("step_size", "must be at most 1 for form='log'", repr(self.step_size), remedy)


class ControllerState(NamedTuple):
    """Holds what the controller remembers of one hyperparameter between rounds."""

    base: float
    """Paper form: the base itself. Log form: the log of the correction."""

    velocity: float = 0.0
    """The smoothed signal."""


def paper_update(
    state: ControllerState, signal: float, *, momentum: float, step_size: float, decay: float
) -> ControllerState:
    r"""One move of the base as printed (paper, eq. 7), and kept positive.

    .. math:: v' = \beta v + (1-\beta)\Delta, \qquad
              \bar\eta' = \bar\eta (1-\gamma) + \lambda v'

    The printed rule can go below zero (:func:`always_positive` says when it cannot), when the velocity
    still has the scale of an earlier, larger base. So a velocity that would take away more than half of
    the base takes half and starts again from zero.

    >>> paper_update(ControllerState(1.0), 0.5, momentum=0.5, step_size=0.5, decay=0.25)
    ControllerState(base=0.875, velocity=0.25)
    >>> paper_update(ControllerState(1.0), -9.0, momentum=0.0, step_size=1.0, decay=0.0)
    ControllerState(base=0.5, velocity=0.0)
    """
    velocity = momentum * state.velocity + (1 - momentum) * signal
    decayed = state.base * (1 - decay)
    if step_size * velocity < -0.5 * decayed:
        return ControllerState(0.5 * decayed, 0.0)
    return ControllerState(decayed + step_size * velocity, velocity)


def always_positive(*, spread: float, momentum: float, step_size: float, decay: float = 0.0) -> bool:
    r"""Tell whether eq. 7 keeps the base above zero whatever the losses do.

    .. math:: \left(\sqrt{1-\gamma} - \sqrt\beta\right)^2 \ge \lambda (1-\beta) \alpha

    >>> always_positive(spread=1 / 9, momentum=0.9, step_size=0.5)  # the paper's constants
    False
    >>> always_positive(spread=0.05, momentum=0.9, step_size=0.5)
    True
    """
    # The worst case is the lowest replica winning every round: signal = -spread * base. The pair
    # (base, velocity) then follows a linear recursion whose base stays positive iff its roots are real.
    root_gap = math.sqrt(1 - decay) - math.sqrt(momentum)
    return root_gap >= 0 and root_gap**2 >= step_size * (1 - momentum) * spread


def log_update(
    state: ControllerState,
    signal: float,
    *,
    momentum: float,
    step_size: float,
    half_width: float,
    max_log_correction: float = math.inf,
) -> ControllerState:
    r"""One move of the log correction inside a trust region (our form).

    .. math:: v' = \beta v + (1-\beta) z, \qquad
              \log m' = \log m + \lambda\, h\, v'

    ``signal`` is the normalised slope :math:`z \in [-1, 1]` and ``half_width`` is
    :math:`h = \max_r |\log\rho_r|`: the base never leaves, in one round, the range that the replicas
    have just tried, and the correction cannot change sign.

    >>> log_update(ControllerState(0.0), 1.0, momentum=0.5, step_size=0.5, half_width=0.1)
    ControllerState(base=0.025, velocity=0.5)
    """
    velocity = momentum * state.velocity + (1 - momentum) * signal
    log_correction = state.base + step_size * half_width * velocity
    return ControllerState(max(-max_log_correction, min(max_log_correction, log_correction)), velocity)

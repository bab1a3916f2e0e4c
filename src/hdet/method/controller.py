"""Controller: moves the base along the signal. Settings, state, and the two update rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hdet.checks import require_choice, require_count, require_number, require_number_or_choice


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
    """How far the velocity moves the base. In the log form: the fraction of the explored range
    (log of the widest multiplier) that the base may cross in one round."""

    momentum: float = 0.9
    """Share of the old velocity that is kept each round."""

    temperature: float | Literal["auto"] = "auto"
    """Softness of the replicas' weights (eq. 4); ``"auto"`` is the spread of their losses.
    The paper states 0.1, its code uses 0.002. The log form does not use it."""

    decay: float | Literal["floor"] = 0.0
    """Share of the base that is taken away each round (paper form). ``"floor"`` matches the floor of
    each hyperparameter at the end of training; it needs a floor and ``total_steps``."""

    max_correction: float = 100.0
    """The log form keeps its correction between 1 / max_correction and max_correction."""

    def __post_init__(self) -> None:
        require_choice("form", self.form, ("paper", "log"))
        require_count("start", self.start, at_least=0)
        require_number("step_size", self.step_size, above=0)
        require_number("momentum", self.momentum, at_least=0, below=1)
        require_number_or_choice("temperature", self.temperature, ("auto",), above=0)
        require_number_or_choice("decay", self.decay, ("floor",), below=1)
        require_number("max_correction", self.max_correction, at_least=1)
        if self.form == "log" and self.decay != 0.0:
            raise ValueError(
                f"decay must be 0 for form='log', got {self.decay!r}: there the planned schedule goes on "
                "and brings its own decay; use form='paper' to replace the schedule by a decay"
            )
        if self.form == "log" and self.step_size > 1:
            raise ValueError(
                f"step_size must be at most 1 for form='log', got {self.step_size!r}: "
                "larger steps would leave the range that the replicas explored"
            )


class ControllerState(NamedTuple):
    """What the controller remembers of one hyperparameter between rounds."""

    base: float
    """Paper form: the base itself. Log form: the log of the correction."""

    velocity: float = 0.0
    """The smoothed signal."""


def paper_update(
    state: ControllerState, signal: float, *, momentum: float, step_size: float, decay: float
) -> ControllerState:
    r"""One move of the base as printed (paper, eq. 7), with a guard against a negative base.

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
    r"""Whether eq. 7 keeps the base above zero whatever the losses do.

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

"""When equation 7 can take the base below zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PAPER", "draw", "largest_step_times_spread", "worst_case"]

PAPER = {"spread": 1 / 9, "momentum": 0.9, "step_size": 0.5}
"""Constants of the paper."""


def worst_case(
    *, spread: float, momentum: float, step_size: float, decay: float = 0.0, num_rounds: int = 2000
) -> list[float]:
    """The base by eq. 7 as printed, from 1, when the replica with the lowest value wins in every round.

    It ends with the round that crosses zero, or where the base is too small for a number.
    """
    base, velocity, bases = 1.0, 0.0, [1.0]
    for _ in range(num_rounds):
        signal = -spread * base
        velocity = momentum * velocity + (1 - momentum) * signal
        base = base * (1 - decay) + step_size * velocity
        bases.append(base)
        if base < 1e-200:
            break
    return bases


def largest_step_times_spread(momentum: float, decay: float = 0.0) -> float:
    r"""The largest :math:`\lambda\alpha` at which the base stays above zero.

    .. math:: \lambda\alpha = \frac{(\sqrt{1-\gamma} - \sqrt\beta)^2}{1-\beta}

    >>> round(largest_step_times_spread(0.9), 4)
    0.0263
    """
    return max(0.0, (1 - decay) ** 0.5 - momentum**0.5) ** 2 / (1 - momentum)


def draw() -> Figure:
    """Left: the base over rounds. Right: where it can cross zero."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    path, plane = figure.subplots(1, 2)
    limit = largest_step_times_spread(PAPER["momentum"])
    for step_times_spread, label in (
        (PAPER["step_size"] * PAPER["spread"], "the paper's constants"),
        (limit, "at the bound"),
        (limit / 2, "half of the bound"),
    ):
        bases = worst_case(spread=step_times_spread, momentum=PAPER["momentum"], step_size=1.0, num_rounds=60)
        path.plot(bases, ".-", markersize=3, label=label)
    path.axhline(0, color="0.4", linewidth=1)
    path.set(xlabel="round", ylabel="base / its start", title="If the lowest replica always wins")
    path.legend()
    momenta = [i / 200 for i in range(199)]
    edge = [largest_step_times_spread(momentum) for momentum in momenta]
    plane.plot(momenta, edge, color="C2", label="the bound")
    plane.fill_between(momenta, 1e-4, edge, color="C2", alpha=0.15)
    tried = [(i / 20, 10 ** (-3.75 + 0.25 * j)) for i in range(1, 20) for j in range(16)]
    for is_safe, style, label in (
        (True, "C2.", "simulated: stays"),
        (False, "C3x", "simulated: crosses zero"),
    ):
        shown = [
            (momentum, product)
            for momentum, product in tried
            if (min(worst_case(spread=product, momentum=momentum, step_size=1.0)) >= 0) == is_safe
        ]
        plane.plot(*zip(*shown, strict=True), style, markersize=4, label=label)
    plane.plot(
        PAPER["momentum"], PAPER["step_size"] * PAPER["spread"], "k*", markersize=11, label="the paper"
    )
    plane.set(yscale="log", ylim=(1e-4, 1), xlim=(0, 1), xlabel="momentum", ylabel="step size times spread")
    plane.set_title("Where the base can cross zero (no decay)")
    plane.legend(loc="lower left")
    return figure

"""How strongly the signal of a round moves the base."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hdet.method.controller import softmax_weights, weighted_deviation
from hdet.method.fan_out import multipliers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "signal", "small_signal", "variance_of_multipliers"]


def variance_of_multipliers(num_replicas: int, spread: float) -> float:
    r"""Of the evenly spaced factors of eq. 1.

    .. math:: \mathrm{Var}(\rho) = \alpha^2\, \frac{N+1}{3(N-1)}

    >>> round(variance_of_multipliers(2, 0.1), 6)
    0.01
    """
    return spread**2 * (num_replicas + 1) / (3 * (num_replicas - 1))


def signal(slope: float, *, num_replicas: int, spread: float, temperature: float) -> float:
    r"""Eqs. 4 to 6 for losses with this slope on the log value: :math:`\Delta/\bar\eta`."""
    factors = multipliers(num_replicas, spread)
    losses = [slope * math.log(factor) for factor in factors]
    return weighted_deviation(softmax_weights(losses, temperature), factors)


def small_signal(slope: float, *, num_replicas: int, spread: float, temperature: float) -> float:
    r"""Its first-order form.

    .. math:: \frac{\Delta}{\bar\eta} \approx -\frac{\mathrm{Var}(\rho)}{\sigma}\, \frac{dL}{d\log\eta}
    """
    return -variance_of_multipliers(num_replicas, spread) / temperature * slope


def draw() -> Figure:
    """Left: signal against slope. Right: what a slope of the size that was measured does, by temperature."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    curve, sizes = figure.subplots(1, 2)
    spread, ratios = 1 / 9, [-60 + i for i in range(121)]
    for i, count in enumerate((2, 8)):
        settings = {"num_replicas": count, "spread": spread, "temperature": 1.0}
        curve.plot(ratios, [signal(x, **settings) for x in ratios], color=f"C{i}", label=f"{count} replicas")
        near = [x for x in ratios if abs(small_signal(x, **settings)) < 0.13]
        curve.plot(near, [small_signal(x, **settings) for x in near], color=f"C{i}", linestyle=":")
    for edge in (-spread, spread):
        curve.axhline(edge, color="0.7", linewidth=1)
    curve.set(xlabel="slope of the loss on log LR / temperature $\\sigma$", ylabel="signal / base")
    curve.set_title("Eqs. 4 to 6, and their first order (dots)")
    curve.legend()
    temperatures = [10 ** (-3 + 0.1 * i) for i in range(31)]
    for slope, label in ((0.041, "probe: its mean"), (0.685, "own batches: their noise")):
        moves = [
            100 * abs(signal(slope, num_replicas=8, spread=spread, temperature=t)) * 0.5 for t in temperatures
        ]
        sizes.plot(temperatures, moves, label=label)
    for t, name in ((0.002, "its code"), (0.1, "the paper")):
        sizes.axvline(t, color="0.5", linestyle=":", linewidth=1)
        sizes.text(t * 1.1, 7, name, va="center", fontsize=8)
    sizes.set(
        xscale="log", yscale="log", xlabel="temperature $\\sigma$", ylabel="move of the base per round, %"
    )
    sizes.set(ylim=(0.008, 12), title="With slopes that were measured")
    sizes.legend(loc="lower left")
    return figure

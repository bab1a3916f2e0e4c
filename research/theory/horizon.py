"""Why the learning rate that looks best soon is too low: the noisy quadratic in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hdet.method.recipe import one_cycle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "GRID",
    "Bowl",
    "State",
    "after",
    "best_lr",
    "best_next_lr",
    "draw",
    "excess_loss",
    "greedy",
    "planned",
    "simulate",
]

Array = NDArray[np.float64]
GRID = np.geomspace(1e-3, 1.5, 300)
"""Learning rates that are tried. Above 2 over the largest curvature, which is 1, SGD diverges."""


class Bowl(NamedTuple):
    """A quadratic with these curvatures, seen through noise."""

    curvatures: Array
    noise: float
    """Variance of the centre that a batch shows."""

    @staticmethod
    def standard(size: int = 100, condition: float = 100.0, num_samples: int = 32) -> Bowl:
        """Curvatures from 1 to 1 / condition, evenly in their logarithm."""
        return Bowl(np.geomspace(1, 1 / condition, size), 1 / num_samples)


class State(NamedTuple):
    """Mean and variance of every coordinate."""

    mean: Array
    variance: Array


def after(bowl: Bowl, state: State, lr: float, num_steps: int) -> State:
    r"""The state after so many steps of SGD at one learning rate.

    .. math:: m_n = a^n m_0, \qquad v_n = a^{2n} v_0 + (\eta h)^2 s^2\, \frac{1 - a^{2n}}{1 - a^2},
              \qquad a = 1 - \eta h
    """
    a = 1 - lr * bowl.curvatures
    kept = a ** (2 * num_steps)
    floor = (lr * bowl.curvatures) ** 2 * bowl.noise / (1 - a**2)
    return State(a**num_steps * state.mean, kept * state.variance + floor * (1 - kept))


def best_next_lr(lr: float) -> float:
    r"""The learning rate with the lowest loss one step from now, at the noise floor of ``lr``.

    At the floor :math:`v = \eta h s^2 / (2 - \eta h)` and :math:`m = 0`. The next loss
    :math:`(1 - \eta' h)^2 v + (\eta' h)^2 s^2` is lowest at

    .. math:: \eta' h = \frac{v}{v + s^2} = \frac{\eta h}{2}

    whatever curvature and noise are.

    >>> best_next_lr(0.3)
    0.15
    """
    return lr / 2


def excess_loss(bowl: Bowl, state: State) -> float:
    r"""Expected loss above the lowest possible one, :math:`\frac12 \sum_i h_i (m_i^2 + v_i)`."""
    return float(0.5 * (bowl.curvatures * (state.mean**2 + state.variance)).sum())


def best_lr(bowl: Bowl, state: State, num_steps: int) -> float:
    """The learning rate with the lowest loss so many steps from now."""
    return float(min(GRID, key=lambda lr: excess_loss(bowl, after(bowl, state, lr, num_steps))))


def greedy(
    bowl: Bowl, state: State, *, num_rounds: int, steps_per_round: int
) -> tuple[list[float], list[float]]:
    """In every round take the learning rate with the lowest loss at its end. Learning rates and losses."""
    lrs, losses = [], []
    for _ in range(num_rounds):
        lrs.append(best_lr(bowl, state, steps_per_round))
        state = after(bowl, state, lrs[-1], steps_per_round)
        losses.append(excess_loss(bowl, state))
    return lrs, losses


def planned(
    bowl: Bowl, state: State, *, peak: float, num_rounds: int, steps_per_round: int
) -> tuple[list[float], list[float]]:
    """A linear one-cycle schedule, constant within a round. Learning rates and losses."""
    lrs, losses = [], []
    for i in range(num_rounds):
        lrs.append(peak * one_cycle(i, num_rounds, warmup=0.1, anneal="linear", end=0.0))
        state = after(bowl, state, lrs[-1], steps_per_round)
        losses.append(excess_loss(bowl, state))
    return lrs, losses


def simulate(
    bowl: Bowl, state: State, lrs: Sequence[float], *, num_runs: int, seed: int
) -> tuple[float, float]:
    """Mean excess loss of runs of SGD from this state, and its standard error."""
    generator = np.random.default_rng(seed)
    shape = (num_runs, len(bowl.curvatures))
    x = state.mean + np.sqrt(state.variance) * generator.standard_normal(shape)
    for lr in lrs:
        centre = np.sqrt(bowl.noise) * generator.standard_normal(shape)
        x -= lr * bowl.curvatures * (x - centre)
    losses = 0.5 * (bowl.curvatures * x**2).sum(axis=1)
    return float(losses.mean()), float(losses.std() / num_runs**0.5)


def draw(num_rounds: int = 100, steps_per_round: int = 10, seed: int = 0) -> Figure:
    """Left: what looks best on the way of a good run. Right: a run that follows it, beside the good one."""
    from matplotlib.figure import Figure

    bowl = Bowl.standard()
    size = len(bowl.curvatures)
    start = State(np.full(size, 5.0), np.zeros(size))
    lengths = {"num_rounds": num_rounds, "steps_per_round": steps_per_round}
    peak = float(min(GRID, key=lambda lr: planned(bowl, start, peak=float(lr), **lengths)[1][-1]))
    plan_lrs, plan_losses = planned(bowl, start, peak=peak, **lengths)
    lrs, losses = greedy(bowl, start, **lengths)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    look, run = figure.subplots(1, 2)
    states = [start]
    for lr in plan_lrs:
        states.append(after(bowl, states[-1], lr, steps_per_round))
    steps = [steps_per_round * i for i in range(num_rounds)]
    look.plot(steps, plan_lrs, color="C2", label="in use: the best schedule")
    for i, ahead in enumerate((1, 10, 100)):
        label = f"looks best {ahead} step{'s' * (ahead > 1)} ahead"
        seen = [best_lr(bowl, state, ahead) for state in states[:-1]]
        look.plot(steps, seen, ":", color=f"C{(3, 0, 4)[i]}", linewidth=2, label=label)
    look.set(yscale="log", ylim=(5e-3, 3), xlabel="step", ylabel="learning rate")
    look.set_title("What looks best on the way")
    look.legend(fontsize=8)
    ends = [steps_per_round * (i + 1) for i in range(num_rounds)]
    for name, color, rates, values in (
        ("follows what looks best 10 steps ahead", "C0", lrs, losses),
        ("the best schedule", "C2", plan_lrs, plan_losses),
    ):
        run.plot(ends, values, color=color, label=f"{name}: {values[-1]:.2g}")
        for num in (num_rounds // 5, num_rounds // 2, num_rounds):
            single = [rate for rate in rates[:num] for _ in range(steps_per_round)]
            mean, _ = simulate(bowl, start, single, num_runs=100, seed=seed)
            run.plot(num * steps_per_round, mean, "x", color=color)
    run.set(yscale="log", xlabel="step", ylabel="loss above the lowest possible")
    run.set_title("Where it leads (x: simulated)")
    run.legend(fontsize=8)
    return figure

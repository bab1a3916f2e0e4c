"""The whole method in one readable loop over replicas in one process (paper, Algorithm 1).

This is the specification. The engines for real processes and for one device are tested against it, value by
value. It is written for reading, not for speed, and runs on anything that has arithmetic: plain floats in the
example below, torch tensors in the tests. Lines in comments are those of Algorithm 1. Controllers that do not
compare replicas watch from outside: :mod:`hdet.method.watches`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from hdet.method import controller as rules
from hdet.method.fan_out import assign, multiplier_at
from hdet.method.recipe import tail_steps

Array = Any  # a float, or anything with the arithmetic of one


class Step(NamedTuple):
    """Tells what one training step used."""

    bases: list[float]
    """The shared value of each hyperparameter (parameter group)."""
    values: list[list[float]]
    """``values[r][g]``: what replica r used for group g."""


class RoundTrace(NamedTuple):
    """Tells what one sync saw and decided."""

    step: int
    losses: list[float]
    weights: list[float]
    signals: list[float]
    velocities: list[float]
    bases: list[float]
    """The base of each group after the sync."""


class Trace(NamedTuple):
    """Everything a run did."""

    steps: list[Step]
    rounds: list[RoundTrace]
    parameters: list[list[Array]]
    """``parameters[r][g]`` at the end."""


class Seen(NamedTuple):
    """Tells what a watch sees of one step."""

    step: int
    center: list[Array]
    """The mean of the replicas' parameters, for each group."""
    bases: list[float]
    losses: list[float]
    """Of each replica on its batch."""
    is_sync: bool


class Watch(Protocol):
    """A controller that looks at the run from outside."""

    factor: float
    """Every base is multiplied by it."""
    decays: Sequence[float]
    """Decoupled weight decay of each group; empty for none."""

    def step_made(self, seen: Seen) -> None:
        """Look, and decide for the steps that follow."""
        ...


def train(
    parameters: Sequence[Array],
    *,
    gradient: Callable[[list[Array], int, int], tuple[float, list[Array]]],
    optimizer: Callable[[Array, Array, dict[str, Array], float], Array],
    schedule: Callable[[int], Sequence[float]],
    num_replicas: int,
    spread: float,
    sync_every: int,
    total_steps: int,
    names: Sequence[str],
    controller: rules.Controller | None = None,
    floors: Sequence[float] | None = None,
    assignment: str = "random",
    seed: int = 0,
    average_tail: float = 0.0,
    watches: Sequence[Watch] = (),
) -> Trace:
    """Train ``num_replicas`` copies with the method and return the full trace.

    Args:
        parameters: one array per parameter group, the same for every replica at the start.
        gradient: ``gradient(parameters, replica, step)`` is the replica's loss and gradient.
        optimizer: ``optimizer(parameter, gradient, slots, value)`` is the new parameter.
        schedule: ``schedule(t)`` is the planned base of every group after t steps.
        num_replicas: number of replicas, N.
        spread: half-width of the multipliers, alpha.
        sync_every: steps per round, T.
        total_steps: steps to train, S.
        names: one name per parameter group; each has a permutation of its own.
        controller: compares the replicas; None to follow the plan.
        floors: what each base decays to, for ``end="floor"``.
        assignment: how replicas are placed in the spreads, see :func:`hdet.method.fan_out.assign`.
        seed: of the assignments.
        average_tail: share of the run, at its end, over whose steps the final parameters are the mean.
        watches: further controllers.

    Two replicas on the loss x^2 / 2, one a little faster than the plan and one a little slower:

    >>> trace = train([1.0], gradient=lambda x, r, t: (x[0] ** 2 / 2, [x[0]]), optimizer=sgd(),
    ...               schedule=lambda t: [0.5], num_replicas=2, spread=0.5, sync_every=1,
    ...               total_steps=2, names=["lr"])
    >>> [step.values for step in trace.steps]
    [[[0.75], [0.25]], [[0.25], [0.75]]]
    >>> trace.parameters
    [[0.25], [0.25]]
    """
    replicas, groups = range(num_replicas), range(len(names))
    fixed = rules.num_fixed_rounds(controller, sync_every)
    theta = [list(parameters) for _ in replicas]
    slots: list[list[dict[str, Array]]] = [[{} for _ in groups] for _ in replicas]
    comparison = Comparing(controller, floors, len(names), sync_every, total_steps)
    losses_of_round: list[list[float]] = []
    tail: list[list[Array]] = []
    steps: list[Step] = []
    rounds: list[RoundTrace] = []

    def bases_after(t: int) -> list[float]:
        factor = math.prod(watch.factor for watch in watches)
        return [comparison.base(g, planned) * factor for g, planned in enumerate(schedule(t))]

    def mean() -> list[Array]:
        return [sum(theta[r][g] for r in replicas) / num_replicas for g in groups]

    for t in range(1, total_steps + 1):  # line 4
        # Fan-out: every replica has its own value, all share one gradient (lines 3, 5 to 8; eqs. 1, 2, 9).
        bases, decays = bases_after(t - 1), [sum(w.decays[g] for w in watches if w.decays) for g in groups]
        places = list(assign(assignment, num_replicas, seed, len(rounds), names, fixed).values())
        values = [[bases[g] * multiplier_at(places[g][r], spread) for g in groups] for r in replicas]
        steps.append(Step(bases, values))
        measured = [gradient(theta[r], r, t) for r in replicas]
        losses_of_round.append([loss for loss, _ in measured])
        for g in groups:
            shared = sum(measured[r][1][g] for r in replicas) / num_replicas
            for r in replicas:
                decayed = theta[r][g] * (1 - values[r][g] * decays[g])
                theta[r][g] = optimizer(decayed, shared, slots[r][g], values[r][g])

        # What is not in the paper looks on: watches, and the mean over the end of the run.
        is_sync = t % sync_every == 0 or t == total_steps
        for watch in watches:
            watch.step_made(Seen(t, mean(), bases, losses_of_round[-1], is_sync))
        if t in tail_steps(total_steps, average_tail):
            tail.append(mean())
        if not is_sync:  # line 9
            continue

        # Measure (lines 12 and 13).
        losses = [sum(of_replica) / len(losses_of_round) for of_replica in zip(*losses_of_round, strict=True)]
        losses_of_round = []

        # Converge (line 10; eq. 3).
        if spread > 0:
            theta = [mean() for _ in replicas]

        # Steer (lines 11 to 16; eqs. 4-8). Otherwise the bases follow the plan (line 19).
        weights, signals = [1 / num_replicas for _ in replicas], [0.0 for _ in groups]
        if controller is not None and t % sync_every == 0 and t >= controller.start:
            weights, signals = comparison.move(losses, bases, values, places, spread)

        # Reassign (line 17; eq. 9): the number of the round chooses the permutations of the next.
        rounds.append(RoundTrace(t, losses, weights, signals, comparison.velocities, bases_after(t)))

    if tail:
        theta = [[sum(point[g] for point in tail) / len(tail) for g in groups] for _ in replicas]
    return Trace(steps, rounds, theta)


class Comparing:
    """Keeps what comparing replicas has made of each base (paper, eqs. 4-8).

    Args:
        controller: the settings; None to follow the plan.
        floors: what each base decays to.
        num_groups: number of bases.
        *length: steps per round, and of the run.
    """

    def __init__(
        self,
        controller: rules.Controller | None,
        floors: Sequence[float] | None,
        num_groups: int,
        *length: int,
    ) -> None:
        self._settings, self._floors, self._length = controller, floors, length
        self._states: list[rules.ControllerState | None] = [None] * num_groups
        self._decays = [0.0] * num_groups

    @property
    def velocities(self) -> list[float]:
        """Give the velocity of each group."""
        return [state.velocity if state else 0.0 for state in self._states]

    def base(self, group: int, planned: float) -> float:
        """Give the base of a group: held in the paper's form, the corrected plan in ours."""
        state = self._states[group]
        if self._settings is None or state is None:
            return planned
        return state.base if self._settings.form == "paper" else math.exp(state.base) * planned

    def move(
        self,
        losses: list[float],
        bases: list[float],
        values: list[list[float]],
        places: list[list[float]],
        spread: float,
    ) -> tuple[list[float], list[float]]:
        """Move every base by what the replicas saw. Give their weights, and the signal of each group."""
        settings = self._settings
        assert settings is not None
        constants = {"momentum": settings.momentum, "step_size": settings.step_size}
        if settings.form != "paper":
            signals = rules.joint_signals(places, losses)
            for g, signal in enumerate(signals):
                self._states[g] = rules.log_update(
                    self._states[g] or rules.ControllerState(0.0),
                    signal,
                    half_width=max(abs(math.log(multiplier_at(x, spread))) for x in places[g]),
                    max_log_correction=math.log(settings.max_correction),
                    **constants,
                )
            return [1 / len(losses)] * len(losses), signals
        sigma = rules.auto_temperature(losses) if settings.temperature == "auto" else settings.temperature
        weights = rules.softmax_weights(losses, sigma)
        signals = []
        for g, state in enumerate(self._states):
            if state is None:  # take over the base where the plan has brought it
                state = rules.ControllerState(bases[g])
                self._decays[g] = self._decay(settings, g, bases[g])
            signals.append(rules.weighted_deviation(weights, [of_replica[g] for of_replica in values]))
            self._states[g] = rules.paper_update(state, signals[g], decay=self._decays[g], **constants)
        return weights, signals

    def _decay(self, settings: rules.Controller, group: int, start: float) -> float:
        end = settings.end
        if end == "floor":
            assert self._floors is not None, "end='floor' needs floors"
            end = self._floors[group] / start
        return rules.decay_to(end, rules.num_controlled_rounds(settings.start, *self._length))


def sgd(momentum: float = 0.0, weight_decay: float = 0.0) -> Callable[..., Array]:
    """Stochastic gradient descent with torch's conventions: coupled decay, undamped momentum.

    >>> sgd(weight_decay=1.0)(2.0, 1.0, {}, 0.5)
    0.5
    """

    def update(parameter: Array, gradient: Array, slots: dict[str, Array], value: float) -> Array:
        direction = gradient + weight_decay * parameter
        if momentum:
            direction = momentum * slots["velocity"] + direction if "velocity" in slots else direction
            slots["velocity"] = direction
        return parameter - value * direction

    return update


def adam(
    beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8, decoupled_weight_decay: float = 0.0
) -> Callable[..., Array]:
    """Adam, and AdamW where ``decoupled_weight_decay`` is above zero.

    >>> round(adam()(1.0, 0.5, {}, 0.1), 6)
    0.9
    """

    def update(parameter: Array, gradient: Array, slots: dict[str, Array], value: float) -> Array:
        step = slots["step"] = slots.get("step", 0) + 1
        slots["m"] = beta1 * slots.get("m", 0.0) + (1 - beta1) * gradient
        slots["v"] = beta2 * slots.get("v", 0.0) + (1 - beta2) * gradient * gradient
        m_hat = slots["m"] / (1 - beta1**step)
        v_hat = slots["v"] / (1 - beta2**step)
        decayed = parameter * (1 - value * decoupled_weight_decay)
        return decayed - value * m_hat / (v_hat**0.5 + epsilon)

    return update

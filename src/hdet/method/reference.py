"""The whole method in one readable loop over replicas in one process (paper, Algorithm 1).

This is the specification. The engines for real processes and for one device are tested against it,
value by value. It is written for reading, not for speed, and runs on anything that has arithmetic:
plain floats in the example below, torch tensors in the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from hdet.method import thermostat
from hdet.method.controller import (
    Controller,
    ControllerState,
    auto_temperature,
    floor_matching,
    joint_signals,
    log_update,
    num_controlled_rounds,
    paper_update,
    softmax_weights,
    weighted_deviation,
)
from hdet.method.fan_out import assign, multiplier_at
from hdet.method.recipe import tail_steps
from hdet.method.weight_decay import (
    SCALES,
    DecayState,
    HeldOutWeightDecay,
    least_strength,
    look_of,
    may_look,
    moved,
)

Array = Any  # a float, or anything with the arithmetic of one


class Step(NamedTuple):
    """Tells what one training step used."""

    bases: list[float]
    """The shared value of each hyperparameter (parameter group)."""
    values: list[list[float]]
    """``values[r][g]``: what replica r used for group g."""


class Round(NamedTuple):
    """Tells what one sync saw and decided."""

    step: int
    losses: list[float]
    weights: list[float]
    signals: list[float]
    velocities: list[float]
    bases: list[float]
    """The base of each group after the sync."""


class DecayPlan(NamedTuple):
    """Weight decay that held-out data moves; decoupled, as in AdamW."""

    start: Sequence[float]
    """Of every group; zero for a group that does not decay."""
    peaks: Sequence[float]
    """Of every group's learning rate."""
    sizes: Sequence[int]
    """Numbers in every group."""
    probe: Callable[[list[Array]], Sequence[float]]
    """Gives the losses of the parts of the held-out data."""
    controller: HeldOutWeightDecay = HeldOutWeightDecay()


class ThermostatPlan(NamedTuple):
    """Learning rate that is moved by what averaging gains."""

    peak: float
    """Of the first group's learning rate, as planned."""
    probe: Callable[[list[Array]], float]
    """Gives the loss on the probe."""
    told: thermostat.Thermostat = thermostat.Thermostat()


class Trace(NamedTuple):
    """Everything a run did."""

    steps: list[Step]
    rounds: list[Round]
    parameters: list[list[Array]]
    """``parameters[r][g]`` at the end."""
    weight_decays: list[list[float]]
    """Of each group after every round, where held-out data moves them; else zeros."""
    factors: list[float]
    """On the plan, after every round of the thermostat."""


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
    controller: Controller | None = None,
    floors: Sequence[float] | None = None,
    assignment: str = "random",
    seed: int = 0,
    average_tail: float = 0.0,
    decay_plan: DecayPlan | None = None,
    thermostat_plan: ThermostatPlan | None = None,
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
        controller: settings of the controller, or None to follow the plan.
        floors: what each base decays to, for ``decay="floor"``.
        assignment: how replicas are placed in the spreads, see :func:`hdet.method.fan_out.assign`.
        seed: of the assignments.
        average_tail: share of the run, at its end, over whose steps the final parameters are the mean.
        decay_plan: weight decay that held-out data moves; None for that of the optimizer alone.
        thermostat_plan: learning rate that is moved by what averaging gains; None for no thermostat.

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
    theta = [list(parameters) for _ in replicas]
    slots: list[list[dict[str, Array]]] = [[{} for _ in groups] for _ in replicas]
    control: list[ControllerState | None] = [None for _ in groups]
    decays = [0.0 for _ in groups]
    seen: list[list[float]] = []
    tail: list[list[Array]] = []
    steps: list[Step] = []
    rounds: list[Round] = []
    weight_decays = [0.0 for _ in groups] if decay_plan is None else list(decay_plan.start)
    decay_state: DecayState | None = None
    first_strength = least = 0.0
    since_look: list[float] = []
    decays_after: list[list[float]] = []
    heat, factors = thermostat.ThermostatState(), list[float]()
    path: list[tuple[list[Array], float, float]] = []  # mean weights, base and loss of its steps

    def base(group: int, step: int) -> float:
        state, planned = control[group], schedule(step)[group] * math.exp(heat.log_factor)
        if controller is None or state is None:
            return planned
        return state.base if controller.form == "paper" else math.exp(state.base) * planned

    def decay(group: int, start: float) -> float:
        assert controller is not None
        if controller.decay != "floor":
            return controller.decay
        assert floors is not None, "decay='floor' needs floors"
        num_rounds = num_controlled_rounds(controller.start, sync_every, total_steps)
        return floor_matching(start, floors[group], num_rounds)

    for t in range(1, total_steps + 1):
        # Fan-out: every replica has its own value, all share one gradient (eqs. 1, 2, 9).
        bases = [base(g, t - 1) for g in groups]
        places = list(assign(assignment, num_replicas, seed, len(rounds), names).values())
        values = [[bases[g] * multiplier_at(places[g][r], spread) for g in groups] for r in replicas]
        steps.append(Step(bases, values))
        measured = [gradient(theta[r], r, t) for r in replicas]
        shared = [sum(measured[r][1][g] for r in replicas) / num_replicas for g in groups]
        for r in replicas:
            for g in groups:
                decayed = theta[r][g] * (1 - values[r][g] * weight_decays[g])
                theta[r][g] = optimizer(decayed, shared[g], slots[r][g], values[r][g])
        seen.append([loss for loss, _ in measured])
        if t in tail_steps(total_steps, average_tail):
            tail.append([sum(theta[r][g] for r in replicas) / num_replicas for g in groups])

        # Thermostat: what the mean of a round's weights gains over the last ones. Where replicas differ, its
        # rounds end at syncs.
        is_sync = t % sync_every == 0 or t == total_steps
        if thermostat_plan is not None and len(heat.rounds) < thermostat.LAST:
            center = [sum(theta[r][g] for r in replicas) / num_replicas for g in groups]
            path.append((center, bases[0], fmean(seen[-1])))
            is_over = t >= thermostat.round_ends(total_steps)[len(heat.rounds) + 1]
            if is_over and (is_sync or spread == 0):
                averaged = [sum(point[g] for point, _, _ in path) / len(path) for g in groups]
                ended = thermostat.Round(
                    step=t,
                    middle=t - (len(path) - 1) / 2,
                    lr=fmean(value for _, value, _ in path) / thermostat_plan.peak,
                    end=thermostat_plan.probe(center),
                    mean=thermostat_plan.probe(averaged),
                    train=fmean(loss for _, _, loss in path),
                )
                heat, path = thermostat.steered(heat, ended, thermostat_plan.told), []
                factors.append(math.exp(heat.log_factor))

        if not is_sync:
            continue

        # Measure.
        losses = [sum(of_replica) / len(seen) for of_replica in zip(*seen, strict=True)]
        seen = []

        # Converge (eq. 3).
        if spread > 0:
            mean = [sum(theta[r][g] for r in replicas) / num_replicas for g in groups]
            theta = [list(mean) for _ in replicas]

        # Steer (eqs. 4-8).
        weights, signals = [1 / num_replicas for _ in replicas], [0.0 for _ in groups]
        if controller is not None and t % sync_every == 0 and t >= controller.start:
            constants = {"momentum": controller.momentum, "step_size": controller.step_size}
            if controller.form == "paper":
                temperature = controller.temperature
                sigma = auto_temperature(losses) if temperature == "auto" else temperature
                weights = softmax_weights(losses, sigma)
            else:
                signals = joint_signals(places, losses)
            for g in groups:
                state = control[g]
                if controller.form == "paper":
                    if state is None:  # take over the base where the plan has brought it
                        state = ControllerState(bases[g])
                        decays[g] = decay(g, bases[g])
                    signals[g] = weighted_deviation(weights, [values[r][g] for r in replicas])
                    control[g] = paper_update(state, signals[g], decay=decays[g], **constants)
                else:
                    control[g] = log_update(
                        state or ControllerState(0.0),
                        signals[g],
                        half_width=max(abs(math.log(multiplier_at(x, spread))) for x in places[g]),
                        max_log_correction=math.log(controller.max_correction),
                        **constants,
                    )
        velocities = [state.velocity if state else 0.0 for state in control]

        # Weight decay: what more and less of it would have done, told by smaller and larger weights.
        if decay_plan is not None:
            plan, done, before = decay_plan, t / total_steps, (rounds[-1].step if rounds else 0) / total_steps
            since_look += losses
            if decay_state is None:
                strengths = [w * p * n for w, p, n in zip(plan.start, plan.peaks, plan.sizes, strict=True)]
                decaying = sum(n for w, n in zip(plan.start, plan.sizes, strict=True) if w)
                decay_state = DecayState(sum(strengths) / decaying * total_steps)
                first_strength, least = decay_state.strength, least_strength(decay_state.strength)
            if plan.controller.is_due(done, before):
                training_loss, since_look = sum(since_look) / len(since_look), []
                if may_look(done):
                    scaled = [
                        [theta[0][g] * (scale if plan.start[g] else 1.0) for g in groups] for scale in SCALES
                    ]
                    look = look_of(*map(plan.probe, scaled))
                    decay_state = moved(
                        decay_state, look, training_loss=training_loss, share_done=done, least=least
                    )
                    weight_decays = [w * decay_state.strength / first_strength for w in plan.start]

        # Reassign: the next round draws its own permutations.
        bases = [base(g, t) for g in groups]
        rounds.append(Round(t, losses, weights, signals, velocities, bases))
        decays_after.append(weight_decays)

    if tail:
        theta = [[sum(mean[g] for mean in tail) / len(tail) for g in groups] for _ in replicas]
    return Trace(steps, rounds, theta, decays_after, factors)


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

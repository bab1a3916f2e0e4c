"""The two finders in one readable loop: the scout, then a run with the anchored controller.

It trains all replicas one after the other with plain arithmetic; every engine is tested against it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hdet.core.anchored import (
    AnchoredController,
    AnchoredState,
    anchored_update,
    averaging_weight,
    measuring_interval,
    next_control,
    slowed,
)
from hdet.core.loss_watch import LossWatch, watch_loss
from hdet.core.scout import (
    Scout,
    ScoutState,
    advance,
    decide,
    may_move,
    next_fan,
    steps_per_fan,
    trial_shape,
)

__all__ = ["Found", "train"]

Array = Any


class Found(NamedTuple):
    """What the finders did."""

    factor: float
    """The scout's, on the planned learning rate; 1 without one."""
    log_factors: list[list[float]]
    """The anchored controller's, after every step of the run, by group."""
    lrs: list[list[float]]
    """The learning rates of every step of the run, by group."""
    theta: list[Array]
    """The weights at the end."""


def train(
    *,
    theta: Sequence[Array],
    gradient: Callable[[Sequence[Array], int, int], Sequence[Array]],
    loss: Callable[[Sequence[Array], int, int], float],
    score: Callable[[Sequence[Array]], float],
    update: Callable[[Array, Array, dict[str, Array], float], Array],
    inner: Callable[[Array, Array], float],
    peak: float,
    plan: Callable[[int], float],
    num_replicas: int,
    total_steps: int,
    scout: Scout | None,
    controller: AnchoredController | None,
    is_adaptive: bool,
    group_of: Sequence[int] | None = None,
) -> Found:
    """Scout, start over, and train with a shared gradient.

    Args:
        theta: the initial weights, a list of arrays.
        gradient: ``gradient(theta, replica, step)``, of one replica's batch.
        loss: the same for the loss.
        score: the loss on the probe.
        update: an optimizer of :mod:`hdet.core.reference`.
        inner: the inner product of two arrays.
        peak: the planned peak learning rate.
        plan: the planned factor on it, by step.
        num_replicas: N.
        total_steps: of the whole, scout included.
        scout: its settings.
        controller: its settings.
        is_adaptive: whether the optimizer divides by the gradient's size.
        group_of: which group each array is in, if those may differ.
    """
    start, used, factor, ceiling = list(theta), 0, 1.0, math.inf

    # --- the scout: fans of N trials, each alone, through a miniature of the schedule; the first stage from
    # the start, the second one from the best trial of the first
    if scout is not None:
        lengths = steps_per_fan(scout, num_replicas, total_steps)
        state, lead = ScoutState(), start
        while state.stage != "done":
            length = lengths[state.stage]
            state, factors = next_fan(state, scout, num_replicas)
            trials, scores = [], []
            for replica, trial in enumerate(factors):
                weights, slots = list(start if state.stage == "wide" else lead), [{} for _ in start]
                for k in range(length):
                    slope = gradient(weights, replica, used + k)
                    lr = peak * trial * trial_shape(k, length)
                    weights = [update(*each, lr) for each in zip(weights, slope, slots, strict=True)]
                trials.append(weights)
                scores.append(score(weights))
            used += length
            moves = may_move(state, scout, num_replicas, total_steps, used)
            state, leader = advance(state, factors, scores, may_move=moves)
            lead = lead if leader is None else trials[leader]
        decision = decide(
            state,
            scout,
            num_joined=num_replicas,
            narrow_steps=lengths["narrow"],
            steps_left=total_steps - used,
            is_adaptive=is_adaptive,
            is_corrected=controller is not None,
        )
        factor, ceiling = decision.factor, decision.room_above

    # --- the run: the mean gradient, the plan a little faster, the anchored correction on it
    weights, slots = copy.copy(start), [{} for _ in start]
    num_steps = total_steps - used
    pace = total_steps / num_steps
    away = [0 * x for x in start]
    group_of = group_of or [0] * len(start)
    groups = range(max(group_of) + 1)
    followed: list[int | None] = [None]  # all groups together, and each of several
    if controller is not None and controller.per_group and len(groups) > 1:
        followed += groups
    anchored = dict.fromkeys(followed, AnchoredState())
    totals, since, last = dict.fromkeys(followed, 0.0), 0, 0
    control_at, watch, losses = next_control(0, num_steps), LossWatch(), []
    log_factors = [0.0 for _ in groups]
    found = Found(factor, [], [], weights)
    for t in range(num_steps):
        lrs = [peak * factor * math.exp(u) * plan(round(t * pace)) for u in log_factors]
        slopes = [gradient(weights, replica, used + t) for replica in range(num_replicas)]
        slope = [sum(parts) / num_replicas for parts in zip(*slopes, strict=True)]
        losses += [loss(weights, replica, used + t) for replica in range(num_replicas)]
        interval = measuring_interval(control_at - last)
        is_measuring = (t - last) % interval == 0
        if is_measuring:
            parts = [inner(g, d) for g, d in zip(slope, away, strict=True)]
            for key in followed:
                totals[key] += math.fsum(p for p, g in zip(parts, group_of, strict=True) if key in (None, g))
            since += 1
        rates = [lrs[g] for g in group_of]
        weights = [update(*each) for each in zip(weights, slope, slots, rates, strict=True)]
        if controller is not None:
            if is_measuring:
                w = averaging_weight(controller, t + 1, interval)
                away = [d + w * (x - x0 - d) for d, x, x0 in zip(away, weights, start, strict=True)]
            if t + 1 >= control_at:
                log_time = math.log((t + 1) / max(1, last))
                acts = t + 1 >= controller.start * num_steps
                watch, is_spoilt = watch_loss(watch, math.fsum(losses) / len(losses))
                if acts and is_spoilt:  # back to the plan, and not as high again
                    acts = False
                    highest = max(state.log_factor for state in anchored.values())
                    ceiling = min(ceiling, math.exp(max(0.0, highest / 2)))
                    anchored = {key: slowed(state, controller) for key, state in anchored.items()}
                for key in followed:
                    limit = controller.limit if key is None else controller.group_limit
                    anchored[key], _ = anchored_update(
                        anchored[key],
                        totals[key] / since,
                        log_time,
                        controller,
                        acts=acts,
                        highest=min(limit, ceiling),
                    )
                # a group may rise above what all together ask for, and does not fall below it
                common = anchored[None].log_factor
                log_factors = [max(common, anchored.get(g, anchored[None]).log_factor) for g in groups]
                totals, since, last, losses = dict.fromkeys(followed, 0.0), 0, t + 1, []
                control_at = next_control(t + 1, num_steps)
        found.log_factors.append(log_factors)
        found.lrs.append(lrs)
    return found._replace(theta=weights)

"""Steer: turn the replicas' losses into a move of every dial's base (eqs. 4-8, and our form)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hdet.core.controller import Controller, ControllerState, log_update, paper_update
from hdet.core.decay import floor_matching
from hdet.core.signal import auto_temperature, joint_signals, softmax_weights, weighted_deviation
from hdet.explore import Dial

__all__ = ["Steering", "steer"]


@dataclass
class Steering:
    """What was decided at one sync."""

    weights: list[float] = field(default_factory=list)
    temperature: float | None = None
    signal: dict[str, float] = field(default_factory=dict)


def steer(
    dials: Sequence[Dial],
    controller: Controller,
    *,
    losses: Mapping[int, float],
    num_replicas: int,
    positions: Mapping[str, Sequence[float]],
    num_rounds: int,
) -> Steering:
    """Move the base of every dial.

    Args:
        dials: what is explored; each takes its new base.
        controller: the settings.
        losses: the loss of every replica that takes part in the comparison.
        num_replicas: how many there are in all.
        positions: where each replica stood in the spread of each dial.
        num_rounds: how many rounds train on a base that the controller has set.
    """
    replicas = sorted(losses)
    compared = [losses[r] for r in replicas]
    result = Steering()
    weights = [1 / len(replicas)] * len(replicas) if replicas else []
    if controller.form == "paper" and len(replicas) > 1:
        result.temperature = (
            auto_temperature(compared) if controller.temperature == "auto" else controller.temperature
        )
        weights = softmax_weights(compared, result.temperature)
    result.weights = [0.0] * num_replicas
    for r, weight in zip(replicas, weights, strict=True):
        result.weights[r] = weight

    can_compare = len(replicas) > 1
    if controller.form == "paper":
        for dial in dials:
            state = dial.control
            if state is None:  # take over the base where the plan has brought it
                start = dial.inner(dial.base)
                if start <= 0:
                    continue  # a schedule that begins at zero: not yet
                state = ControllerState(start)
                dial.decay = _decay(controller, dial, num_rounds)
            places = [positions[dial.name][r] for r in replicas]
            values = [state.base * rho for rho in dial.multipliers(places)]
            signal = weighted_deviation(weights, values) if can_compare else 0.0
            state = paper_update(
                state,
                signal,
                momentum=controller.momentum,
                step_size=controller.step_size,
                decay=dial.decay,
            )
            dial.hold(state)
            result.signal[dial.name] = signal
    else:
        # A dial without width this round has no effect to estimate, and takes no part of the others'.
        wide = [dial for dial in dials if dial.spread * dial.share > 0]
        columns = [[positions[dial.name][r] for r in replicas] for dial in wide]
        signals = joint_signals(columns, compared) if can_compare else [0.0] * len(wide)
        for dial, signal in zip(wide, signals, strict=True):
            state = log_update(
                dial.control or ControllerState(0.0),
                signal,
                momentum=controller.momentum,
                step_size=controller.step_size,
                half_width=dial.half_width,
                max_log_correction=math.log(controller.max_correction),
            )
            dial.correct(state)
            result.signal[dial.name] = signal
    return result


def _decay(controller: Controller, dial: Dial, num_rounds: int) -> float:
    if controller.decay != "floor":
        return controller.decay
    assert dial.floor is not None, "checked when the ensemble was built"
    return floor_matching(dial.inner(dial.base), dial.floor, num_rounds)

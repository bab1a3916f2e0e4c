"""The controller that was asked for, at work."""

from __future__ import annotations

from hdet.ensemble.comparing import ComparingSteering
from hdet.ensemble.guarding import GuardSteering
from hdet.ensemble.steering import Steering
from hdet.ensemble.warn_once import WarnOnce
from hdet.errors import HdetWarning, warn
from hdet.explore import ExploredValues
from hdet.method.controller import Controller
from hdet.method.decay import num_controlled_rounds
from hdet.method.guard import Guard
from hdet.replicas import Replicas


def build_steering(
    controller: Controller | Guard | None,
    values: ExploredValues,
    replicas: Replicas,
    *,
    sync_every: int,
    total_steps: int | None,
    warn: WarnOnce,
) -> Steering:
    """What the settings stand for; raises if it could not do its work here. Nothing is changed."""
    if controller is None:
        return Steering()  # the schedule alone decides
    if isinstance(controller, Guard):
        length = _check_guard(values, total_steps)
        return GuardSteering(controller, values, replicas, total_steps=length, warn=warn)
    num_rounds = _check_comparing(
        controller, values, sync_every=sync_every, total_steps=total_steps, has_probe=replicas.has_probe
    )
    return ComparingSteering(
        controller, values, replicas, sync_every=sync_every, num_rounds=num_rounds, warn=warn
    )


def _check_guard(values: ExploredValues, total_steps: int | None) -> int:
    """Raise if the guard could not do its work here; return the length of the run."""
    if total_steps is None:
        raise ValueError("total_steps must be given for a Guard, got None: it needs the length of the run")
    if not values.learning_rates:
        raise ValueError(
            "explore must hold an hdet.LearningRate for a Guard to lower, got none: add "
            "hdet.LearningRate(spread=0)"
        )
    return total_steps


def _check_comparing(
    controller: Controller,
    values: ExploredValues,
    *,
    sync_every: int,
    total_steps: int | None,
    has_probe: bool,
) -> int:
    """Raise if the controller could not do its work here; return how many rounds it controls."""
    num_rounds = 0
    if total_steps is not None:
        num_rounds = num_controlled_rounds(controller.start, sync_every, total_steps)
        if num_rounds < 1:
            raise ValueError(
                f"controller start must leave at least one round to train, got start={controller.start} "
                f"with sync_every={sync_every} and total_steps={total_steps}: "
                "start earlier, sync more often, or leave the controller off"
            )
    if controller.decay == "floor":
        missing = [tunable.name for tunable in values.tunables if tunable.floor is None]
        if total_steps is None or missing:
            raise ValueError(
                "decay='floor' needs total_steps and a floor for every hyperparameter, got "
                f"total_steps={total_steps} and no floor for {missing}: "
                "pass total_steps and floor=, or a number as decay"
            )
    incomparable = [tunable.name for tunable in values.tunables if tunable.changes_loss]
    if incomparable and not has_probe:
        raise ValueError(
            f"probe must be given to steer {incomparable}, got None: they change the loss itself, so the "
            "replicas' training losses cannot be compared. Pass probe=, a function that returns the plain "
            "loss on one fixed batch, or leave the controller off"
        )
    if not values.explores:
        warn(
            "the controller has nothing to compare at spread 0: only its decay acts",
            HdetWarning,
        )
    return num_rounds

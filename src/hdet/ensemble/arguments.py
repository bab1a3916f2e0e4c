"""Checks of the ensemble's arguments, before anything is changed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hdet.core.anchored import AnchoredController
from hdet.core.assign import DESIGNS
from hdet.core.checks import require_choice, require_count, require_number
from hdet.core.controller import Controller
from hdet.core.decay import num_controlled_rounds
from hdet.errors import HdetWarning
from hdet.explore import Dial
from hdet.telemetry import RecordSink

__all__ = ["check_anchored", "check_arguments", "check_controller"]


def check_arguments(
    *,
    optimizer: object,
    scheduler: object,
    model: object,
    explore: Sequence[object],
    sync_every: object,
    controller: object,
    total_steps: object,
    seed: object,
    records: object,
    bucket_mib: object,
    assignment: object,
    moments: object,
    probe: object,
    average_tail: object,
) -> None:
    """Raise if an argument is of the wrong kind or out of range."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {optimizer!r} of type {type(optimizer).__name__}"
        )
    for i, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            raise ValueError(
                f"optimizer must have parameters in every group, got none in group {i}: remove the group"
            )
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise TypeError(
            f"scheduler must have a step() method, got {scheduler!r} of type {type(scheduler).__name__}"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "scheduler must plan by steps alone, got a ReduceLROnPlateau, which asks for a metric at each: "
            "use a schedule of steps, or a constant plan"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError("scheduler must drive the same optimizer as the ensemble, got another one")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module or None, got {model!r} of type {type(model).__name__}"
        )
    if not explore:
        raise ValueError(
            "explore must name at least one hyperparameter, got none: leave it out for the default"
        )
    for h in explore:
        if not callable(getattr(h, "dials", None)):
            raise TypeError(
                f"explore must hold hyperparameters such as hdet.LearningRate(), got {h!r} of type "
                f"{type(h).__name__}"
            )
    require_count("sync_every", sync_every)
    if controller is not None and not isinstance(controller, Controller | AnchoredController):
        raise TypeError(
            "controller must be an hdet.Controller, an hdet.AnchoredController or None, got "
            f"{controller!r} of type {type(controller).__name__}"
        )
    if total_steps is not None:
        require_count("total_steps", total_steps)
    require_count("seed", seed, at_least=0)
    if records is not None and not isinstance(records, RecordSink):
        raise TypeError(
            f"records must have a write(record) method, such as hdet.Records(), got {records!r} of type "
            f"{type(records).__name__}"
        )
    require_number("bucket_mib", bucket_mib, above=0)
    require_choice("assignment", assignment, DESIGNS)
    require_choice("moments", moments, ("auto", "average", "keep"))
    if probe is not None and not callable(probe):
        raise TypeError(f"probe must be callable or None, got {probe!r} of type {type(probe).__name__}")
    if require_number("average_tail", average_tail, at_least=0, below=1) and total_steps is None:
        raise ValueError(
            "total_steps must be given to average the tail of the run, got None: pass it, or leave out "
            "average_tail"
        )


def check_anchored(
    controller: AnchoredController, dials: Sequence[Dial], *, total_steps: int | None, explores: bool
) -> None:
    """Raise if the anchored controller could not do its work here."""
    if total_steps is None:
        raise ValueError(
            "total_steps must be given for an AnchoredController, got None: it needs the length of the run"
        )
    if not dials:
        raise ValueError(
            "explore must hold an hdet.LearningRate for an AnchoredController to move, got none: add "
            "hdet.LearningRate(spread=0)"
        )
    if controller.copy_on_cpu and explores:
        raise ValueError(
            "copy_on_cpu must be False where replicas differ, got True: their copies are averaged on the "
            "device; set every spread to 0, or leave it out"
        )


def check_controller(
    controller: Controller,
    dials: Sequence[Dial],
    *,
    sync_every: int,
    total_steps: int | None,
    explores: bool,
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
        missing = [dial.name for dial in dials if dial.floor is None]
        if total_steps is None or missing:
            raise ValueError(
                "decay='floor' needs total_steps and a floor for every hyperparameter, got "
                f"total_steps={total_steps} and no floor for {missing}: "
                "pass total_steps and floor=, or a number as decay"
            )
    incomparable = [dial.name for dial in dials if dial.changes_loss]
    if incomparable and not has_probe:
        raise ValueError(
            f"probe must be given to steer {incomparable}, got None: they change the loss itself, so the "
            "replicas' training losses cannot be compared. Pass probe=, a function that returns the plain "
            "loss on one fixed batch, or leave the controller off"
        )
    if not explores:
        warnings.warn(
            "the controller has nothing to compare at spread 0: only its decay acts",
            HdetWarning,
            stacklevel=3,
        )
    return num_rounds

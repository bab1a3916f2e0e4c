"""Checks of the ensemble's arguments, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hdet.core.assign import DESIGNS
from hdet.core.checks import require_choice, require_count, require_number
from hdet.core.controller import Controller
from hdet.core.guard import Guard
from hdet.explore import ExploredValues
from hdet.replicas import Replicas
from hdet.telemetry import RecordSink

__all__ = ["check_arguments", "check_replicas"]


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
        if not callable(getattr(h, "tunables", None)):
            raise TypeError(
                f"explore must hold hyperparameters such as hdet.LearningRate(), got {h!r} of type "
                f"{type(h).__name__}"
            )
    require_count("sync_every", sync_every)
    if controller is not None and not isinstance(controller, Controller | Guard):
        raise TypeError(
            "controller must be an hdet.Controller, an hdet.Guard or None, got "
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


def check_replicas(
    optimizer: Optimizer,
    model: nn.Module | None,
    replicas: Replicas,
    values: ExploredValues,
) -> None:
    """Raise for optimizers and models whose replicas would silently be trained or averaged wrong."""
    if model is not None and any(_is_a(module, "FullyShardedDataParallel") for module in model.modules()):
        raise TypeError(
            "model must hold whole parameters in every process, got a FullyShardedDataParallel: each rank "
            "holds another shard behind one parameter. Use fully_shard, or DistributedDataParallel"
        )
    if _is_a(optimizer, "ZeroRedundancyOptimizer"):
        raise TypeError(
            "optimizer must step all parameters in every process, got a ZeroRedundancyOptimizer: each rank "
            "steps its part with its own learning rate and sends it to the others. Use a plain optimizer"
        )
    if isinstance(optimizer, LBFGS) and values.explores and replicas.has_others:
        raise TypeError(
            "optimizer must make one step per call where replicas differ, got LBFGS: replicas would evaluate "
            "their closures a different number of times and wait for each other forever. Set every spread to "
            "0, or use another optimizer"
        )


def _is_a(thing: object, class_name: str) -> bool:
    # By name: importing these classes takes as long as importing half of torch.
    return any(kind.__name__ == class_name for kind in type(thing).__mro__)

"""Checks of the ensemble's arguments, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hdet.checks import require_choice, require_count, require_number
from hdet.explore import ExploredValues
from hdet.method.assign import DESIGNS
from hdet.method.controller import Controller
from hdet.method.guard import Guard
from hdet.method.merges import LateMerge, MeanMerge, Merge
from hdet.records import RecordSink
from hdet.replicas import Replicas
from hdet.replicas.claims import require_free
from hdet.replicas.supported import require_supported
from hdet.replicas.wrapped import partitioning_layer, plain_optimizer


def check_arguments(
    *,
    layers: Sequence[Optimizer],
    scheduler: object,
    model: object,
    sync_every: object,
    controller: object,
    total_steps: object,
    seed: object,
    records: object,
    bucket_mib: object,
    assignment: object,
    gradients: object,
    merge: object,
    moments: object,
    probe: object,
    average_tail: object,
) -> None:
    """Raise if an argument is of the wrong kind or out of range."""
    optimizer = layers[-1]
    require_free(optimizer)
    if not any(group["params"] for group in optimizer.param_groups):  # one may be empty: frameworks make such
        raise ValueError("optimizer must have parameters, got none in any group: build it from the model's")
    if isinstance(scheduler, Optimizer):
        raise TypeError(
            "scheduler must be a schedule such as a torch LRScheduler, got the optimizer "
            f"{type(scheduler).__name__}: leave it out for constant values"
        )
    if type(scheduler).__module__.startswith("timm.") and hasattr(scheduler, "step_update"):
        raise TypeError(
            f"scheduler must move on at step() alone, got timm's {type(scheduler).__name__}, which asks for "
            "the number of the epoch or update: use a torch LRScheduler, such as LambdaLR with its shape"
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
    if plain_optimizer(getattr(scheduler, "optimizer", optimizer)) is not optimizer:
        raise ValueError("scheduler must drive the same optimizer as the ensemble, got another one")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module or None, got {model!r} of type {type(model).__name__}"
        )
    require_supported(layers, model)
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
    require_choice("gradients", gradients, ("shared", "local"))
    require_choice("moments", moments, ("auto", "average", "keep", "reset"))
    _check_merge(merge, gradients, moments, controller, total_steps)
    if probe is not None and not callable(probe):
        raise TypeError(f"probe must be callable or None, got {probe!r} of type {type(probe).__name__}")
    if require_number("average_tail", average_tail, at_least=0, below=1) and total_steps is None:
        raise ValueError(
            "total_steps must be given to average the tail of the run, got None: pass it, or leave out "
            "average_tail"
        )


def _check_merge(
    merge: object, gradients: object, moments: object, controller: object, total_steps: object
) -> None:
    if merge is None or isinstance(merge, MeanMerge):
        return
    if not isinstance(merge, Merge):
        raise TypeError(
            f"merge must be a merge rule such as hdet.OuterMerge(), or None, got {merge!r} of type "
            f"{type(merge).__name__}"
        )
    name = type(merge).__name__
    if gradients != "local":
        raise ValueError(
            f"gradients must be 'local' for {name}, got {gradients!r}: replicas that share a gradient hardly "
            "differ. Pass gradients='local', or leave merge out"
        )
    if merge.stays_apart and moments not in ("auto", "keep"):
        raise ValueError(
            f"moments must be 'auto' or 'keep' with {name}, got {moments!r}: replicas stay apart at a sync, "
            "and each has its own. Leave moments out"
        )
    if isinstance(merge, LateMerge) and total_steps is None:
        raise ValueError(
            "total_steps must be given for LateMerge, got None: it counts from the end of the run"
        )
    if isinstance(controller, Guard) and (merge.has_state or merge.stays_apart):
        raise ValueError(
            f"controller must not be an hdet.Guard with {name}: it would put weights back, but not what the "
            "merge rule remembers. Leave the guard out, or use another rule"
        )


def check_replicas(
    layers: Sequence[Optimizer],
    model: nn.Module | None,
    replicas: Replicas,
    values: ExploredValues,
    *,
    gradients: str,
) -> None:
    """Raise for optimizers that do not go with replicas that differ."""
    kind = partitioning_layer(layers)
    if kind is not None and model is None:
        raise ValueError(
            f"model must be given with a {kind}, got None: the optimizer holds a part of the parameters only"
        )
    if not ((values.explores or gradients == "local") and replicas.has_others):
        return
    if kind is not None:
        raise TypeError(
            f"optimizer must step all parameters in every process where replicas differ, got a {kind}: each "
            "rank steps its part with its own learning rate and sends it to the others. Set every spread to "
            "0 and share gradients, or use a plain optimizer"
        )
    if isinstance(layers[-1], LBFGS):
        raise TypeError(
            "optimizer must make one step per call where replicas differ, got LBFGS: replicas would evaluate "
            "their closures a different number of times and wait for each other forever. Set every spread to "
            "0 and share gradients, or use another optimizer"
        )
    for layer in layers:
        if _keeps_own_weights(layer):
            raise TypeError(
                "optimizer must not average the weights over time itself where replicas differ, got "
                f"{type(layer).__name__}: its averages and their weights follow each replica's learning rate "
                "and part for good. Set every spread to 0 and share gradients, or use a plain optimizer with "
                "average_tail"
            )


def _keeps_own_weights(optimizer: Optimizer) -> bool:
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    return any("ScheduleFree" in name or name in ("ASGD", "Lookahead") for name in names)

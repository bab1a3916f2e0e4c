"""Construction: checks what an ensemble is built of, and finds who builds it together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hdet.checks import require_kind, require_number
from hdet.ensemble.settings import Settings
from hdet.replicas import RankReplicas, ReplicaGroup, Replicas
from hdet.replicas.copies import ALONE
from hdet.replicas.gradients import require_local_gradients
from hdet.replicas.optimizers import (
    optimizer_layers,
    partitioning_layer,
    plain_model,
    plain_optimizer,
    plain_scheduler,
    require_free,
)
from hdet.replicas.refusals import OPTIMIZERS, SCHEDULERS, refuse, require_supported
from hdet.replicas.tensors import parameters_of


def unwrapped(optimizer: Any, scheduler: Any, model: Any) -> tuple[list[Optimizer], Any, Any]:
    """Give the optimizer with its wrappers, the schedule itself, and the model as it is before compilation.

    Raises if one of them is of the wrong kind, or if they do not belong together.
    """
    layers, scheduler, model = optimizer_layers(optimizer), plain_scheduler(scheduler), plain_model(model)
    optimizer = layers[-1]
    require_free(optimizer)
    if not any(group["params"] for group in optimizer.param_groups):  # one may be empty: frameworks make such
        raise ValueError("optimizer must have parameters, got none in any group: build it from the model's")
    refuse("scheduler", [scheduler], SCHEDULERS)
    is_schedule = scheduler is None or hasattr(scheduler, "step")
    require_kind("scheduler must have a step() method", scheduler, is_schedule)
    if plain_optimizer(getattr(scheduler, "optimizer", optimizer)) is not optimizer:
        raise ValueError("scheduler must drive the same optimizer as the ensemble, got another one")
    is_model = model is None or isinstance(model, nn.Module)
    trained = "pass the model that the optimizer trains"
    require_kind("model must be a torch.nn.Module or None", model, is_model, trained)
    require_supported(layers, model)
    kind = partitioning_layer(layers)
    if kind is not None and model is None:
        raise ValueError(
            f"model must be given with a {kind}, got None: the optimizer holds a part of the parameters only"
        )
    return layers, scheduler, model


def group_of(replicas: Any, optimizer: Any, patience: float) -> ReplicaGroup:
    """Find who builds the ensemble together."""
    if isinstance(replicas, Replicas):
        return ALONE
    group = ReplicaGroup.of_parameters(replicas, parameters_of(optimizer_layers(optimizer)[-1]))
    return replace(group, patience=require_number("patience", patience, above=0))


def replicas_of(
    replicas: Any,
    settings: Settings,
    group: ReplicaGroup,
    model: nn.Module | None,
    layers: Sequence[Optimizer],
) -> Replicas:
    """Give the replicas of an ensemble: those of the user, or this process's own, joined by a group."""
    if isinstance(replicas, Replicas):
        return replicas
    probe, optimizer = settings.probe, layers[-1]
    if probe is not None and model is None:
        raise ValueError("model must be given with a probe, got None: it is what the probe scores")
    if settings.is_local:
        require_local_gradients(group, parameters_of(optimizer), model)
    return RankReplicas(group, optimizer, model, probe=probe, bucket_mib=settings.bucket_mib, layers=layers)


def require_may_differ(layers: Sequence[Optimizer]) -> None:
    """Raise if replicas with this optimizer, or with one of its wrappers, cannot differ."""
    refuse("optimizer", layers, OPTIMIZERS, "differ")

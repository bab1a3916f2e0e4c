"""What an ensemble is made of: built from the user's arguments, with nothing of the user's changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import require_number
from hdet.ensemble.arguments import check_arguments, check_replicas
from hdet.ensemble.controllers import build_steering
from hdet.ensemble.loss_table import LossTable
from hdet.ensemble.merging import Merging
from hdet.ensemble.recording import RecordWriter
from hdet.ensemble.round import Rounds
from hdet.ensemble.schedule import Schedule
from hdet.ensemble.steering import Steering
from hdet.ensemble.tail import Tail
from hdet.ensemble.warn_once import WarnOnce
from hdet.explore import ExploredValues, Hyperparameter, LearningRate
from hdet.explore.values import hyperparameters_of
from hdet.method.controller import Controller
from hdet.method.guard import Guard
from hdet.method.merges import LateMerge, MeanMerge, Merge
from hdet.method.tail import tail_steps
from hdet.records import RecordSink
from hdet.replicas import RankReplicas, ReplicaGroup, Replicas
from hdet.replicas.local_gradients import require_local_gradients
from hdet.replicas.tensors import has_coupled_decay, parameters_of
from hdet.replicas.together import raising_together
from hdet.replicas.wrapped import optimizer_layers, plain_model, plain_scheduler

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of an ensemble, which know each other."""

    optimizer: Optimizer
    """The inner one, which makes the steps."""
    scheduler: Schedule | None
    total_steps: int | None
    moments: Literal["average", "keep", "reset"]
    replicas: Replicas
    values: ExploredValues
    losses: LossTable
    steering: Steering
    tail: Tail
    merging: Merging
    writer: RecordWriter
    rounds: Rounds
    warn: WarnOnce
    has_rounds: bool
    """Whether there are syncs, also where replicas do not differ."""


def build_parts(
    optimizer: Optimizer,
    *,
    scheduler: Schedule | None,
    model: nn.Module | None,
    explore: Sequence[Hyperparameter] | None,
    sync_every: int,
    controller: Controller | Guard | None,
    total_steps: int | None,
    replicas: dist.ProcessGroup | DeviceMesh | ReplicaGroup | Replicas | None,
    seed: int,
    records: RecordSink | None,
    bucket_mib: float,
    assignment: Literal["random", "latin", "factorial"],
    gradients: Literal["shared", "local"],
    merge: Merge | None,
    moments: Literal["auto", "average", "keep", "reset"],
    probe: Callable[[], Tensor | float] | None,
    average_tail: float,
    patience: float,
) -> Parts:
    """Check the arguments of :class:`hdet.Ensemble`, also against other replicas', and build from them.

    Collective. An error on one rank is an error on all, and nothing has changed then.
    """
    if isinstance(replicas, Replicas):
        group = ReplicaGroup(0, 1)
    else:
        inner = optimizer_layers(optimizer)[-1]
        group = ReplicaGroup.of_parameters(replicas, parameters_of(inner))
        group = replace(group, patience=require_number("patience", patience, above=0))
    with raising_together(group):
        layers, scheduler, model = (
            optimizer_layers(optimizer),
            plain_scheduler(scheduler),
            plain_model(model),
        )
        optimizer = layers[-1]
        if total_steps is None:
            total_steps = getattr(scheduler, "total_steps", None)
        explore = hyperparameters_of(explore) if explore is not None else [LearningRate()]
        check_arguments(
            layers=layers,
            scheduler=scheduler,
            model=model,
            sync_every=sync_every,
            controller=controller,
            total_steps=total_steps,
            seed=seed,
            records=records,
            bucket_mib=bucket_mib,
            assignment=assignment,
            gradients=gradients,
            merge=merge,
            moments=moments,
            probe=probe,
            average_tail=average_tail,
        )
        is_local, merge = gradients == "local", MeanMerge() if merge is None else merge
        if not isinstance(replicas, Replicas):
            if is_local:
                require_local_gradients(
                    group, parameters_of(optimizer), model, shares_first=isinstance(merge, LateMerge)
                )
            replicas = RankReplicas(
                group, optimizer, model, probe=probe, bucket_mib=bucket_mib, layers=layers
            )
        values = ExploredValues(explore, optimizer)
        warn = WarnOnce(is_silent=not replicas.is_writer)
        losses = LossTable(replicas.count)
        steering = build_steering(
            controller,
            values,
            replicas,
            sync_every=sync_every,
            total_steps=total_steps,
            warn=warn,
        )
        check_replicas(layers, model, replicas, values, gradients=gradients)
        tail = Tail(replicas, range(0) if total_steps is None else tail_steps(total_steps, average_tail))
        differ = is_local or has_coupled_decay(optimizer) or any(t.changes_moments for t in values.tunables)
        if moments == "auto":
            moments = "average" if differ and not merge.stays_apart else "keep"
        merging = Merging(
            merge,
            replicas,
            has_local_gradients=is_local,
            keeps_moments=moments == "keep",
            total_steps=total_steps,
        )
        writer = RecordWriter(values, records, is_writer=replicas.is_writer)
        rounds = Rounds(
            replicas,
            values,
            losses,
            steering,
            tail,
            merging,
            sync_every=sync_every,
            seed=seed,
            assignment=assignment,
            is_recorded=writer.keeps_trace,
        )
        rounds.positions(0)  # raises if the assignment does not fit
    replicas.require_same(
        {
            "explore": explore,
            "sync_every": sync_every,
            "controller": controller,
            "total_steps": total_steps,
            "seed": seed,
            "bucket_mib": bucket_mib,
            "assignment": assignment,
            "gradients": gradients,
            "merge": merge,
            "moments": moments,
            "probe": replicas.has_probe,
            "average_tail": average_tail,
        }
    )
    # Records may be given to replica zero alone: every replica then takes part in its rounds.
    is_recorded = replicas.any(records is not None)
    is_active = controller is not None or is_recorded or replicas.needs_syncs
    return Parts(
        optimizer=optimizer,
        scheduler=scheduler,
        total_steps=total_steps,
        moments=moments,
        replicas=replicas,
        values=values,
        losses=losses,
        steering=steering,
        tail=tail,
        merging=merging,
        writer=writer,
        rounds=rounds,
        warn=warn,
        has_rounds=is_active or is_local,
    )

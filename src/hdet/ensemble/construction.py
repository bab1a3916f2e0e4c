"""Builds the parts of an ensemble from the user's arguments, with nothing of the user's changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer

from hdet.checks import require_number
from hdet.ensemble.decay_steering import DecaySteering, SeveralSteering
from hdet.ensemble.merging import LocalMerge
from hdet.ensemble.rounds import ParameterWatch, Rounds
from hdet.ensemble.settings import Settings, check_objects
from hdet.ensemble.state import Schedule
from hdet.ensemble.steering import ComparingSteering, GuardSteering, Steering
from hdet.ensemble.sync import Converge, Describe, LossTable, Measure, Phase, Probe, Reassign, Steer
from hdet.ensemble.tail import Tail
from hdet.ensemble.thermostat_steering import ThermostatSteering
from hdet.errors import WarnOnce
from hdet.explore import ExploredValues, LearningRate
from hdet.explore.values import hyperparameters_of
from hdet.method.controller import Controller
from hdet.method.guard import Guard
from hdet.method.merges import LateMerge
from hdet.method.recipe import tail_steps
from hdet.method.thermostat import Thermostat
from hdet.method.weight_decay import WeightDecayController
from hdet.replicas import RankReplicas, ReplicaGroup, Replicas
from hdet.replicas.exchange import raising_together
from hdet.replicas.gradients import require_local_gradients
from hdet.replicas.optimizers import (
    optimizer_layers,
    partitioning_layer,
    peak_rate,
    plain_model,
    plain_scheduler,
)
from hdet.replicas.probe import Probe as ScoredProbe
from hdet.replicas.refusals import OPTIMIZERS, refuse
from hdet.replicas.tensors import parameters_of


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of an ensemble, which know each other."""

    settings: Settings
    """With the moments resolved."""
    optimizer: Optimizer
    """The inner one, which makes the steps."""
    scheduler: Schedule | None
    replicas: Replicas
    values: ExploredValues
    losses: LossTable
    steering: Steering
    tail: Tail | None
    converge: Converge
    reassign: Reassign
    rounds: Rounds
    watch: ParameterWatch
    warn: WarnOnce
    peaks: list[list[float]]
    """Of every slot of every learning rate, as asked for."""
    is_traced: bool
    """Records tell the base of every step."""
    has_rounds: bool
    """There are syncs, also where replicas do not differ."""


def build(
    optimizer: Any, scheduler: Any, model: Any, replicas: Any, *, patience: float, **told: Any
) -> Parts:
    """Check the arguments of :class:`hdet.Ensemble`, also against other replicas', and build from them.

    Collective. An error on one rank is an error on all, and nothing has changed then.

    Args:
        optimizer: the user's, in its wrappers.
        scheduler: the user's, in its wrappers.
        model: the user's, in its wrappers.
        replicas: what joins the replicas, or the replicas themselves.
        patience: seconds until a missing replica is named.
        **told: the fields of :class:`Settings`.
    """
    is_built = isinstance(replicas, Replicas)
    group = ReplicaGroup(0, 1)
    if not is_built:
        group = ReplicaGroup.of_parameters(replicas, parameters_of(optimizer_layers(optimizer)[-1]))
        group = replace(group, patience=require_number("patience", patience, above=0))
    with raising_together(group):
        layers = optimizer_layers(optimizer)
        optimizer, scheduler, model = layers[-1], plain_scheduler(scheduler), plain_model(model)
        check_objects(layers, scheduler, model)
        explore = told["explore"]
        told["explore"] = [LearningRate()] if explore is None else hyperparameters_of(explore)
        if told["total_steps"] is None:
            told["total_steps"] = getattr(scheduler, "total_steps", None)
        settings = Settings(**told)
        if isinstance(settings.probe, ScoredProbe) and model is None and not is_built:
            raise ValueError("model must be given with an hdet.Probe, got None: it is what the probe scores")
        total_steps, is_local = settings.total_steps, settings.is_local
        if not is_built:
            if is_local:
                shares_first = isinstance(settings.rule, LateMerge)
                require_local_gradients(group, parameters_of(optimizer), model, shares_first=shares_first)
            replicas = RankReplicas(
                group, optimizer, model, probe=settings.probe, bucket_mib=settings.bucket_mib, layers=layers
            )
        values = ExploredValues(settings.explore, optimizer)
        if (values.explores or is_local) and replicas.has_others:
            refuse("optimizer", layers, OPTIMIZERS, "differ")
        warn = WarnOnce(is_silent=not replicas.is_writer)
        kinds = {Guard: GuardSteering, Controller: ComparingSteering, WeightDecayController: DecaySteering}
        kinds |= {Thermostat: ThermostatSteering}
        steerings = [
            kinds[type(one)](replace(settings, controller=one), values, replicas, warn)
            # The guard is before the thermostat, which keeps its factor where the guard goes back.
            for one in sorted(settings.controllers, key=lambda one: isinstance(one, Thermostat))
        ]
        steering = steerings[0] if len(steerings) == 1 else Steering(settings, values, replicas, warn)
        if len(steerings) > 1:
            steering = SeveralSteering(settings, values, replicas, warn)
            steering.parts = steerings
        settings = replace(settings, moments=settings.moments_for(optimizer, values))
        steps = range(0) if total_steps is None else tail_steps(total_steps, settings.average_tail)
        tail = Tail(replicas, steps) if steps else None
        converge = Converge(replicas, tail)
        if is_local:
            converge = LocalMerge(replicas, tail, settings.rule, settings.moments == "keep", total_steps)
        reassign = Reassign(replicas, values, settings)
        reassign.positions(0)  # raises if the assignment does not fit
    replicas.require_same(settings.compared())
    with raising_together(group):
        for one in steerings:
            one.try_out()
    # Records may be given to replica zero alone: every replica then takes part in its rounds.
    is_recorded = replicas.any(settings.records is not None)
    is_traced = settings.records is not None and replicas.is_writer
    losses = LossTable(replicas.count)

    # A recipe that never diverges neither describes nor reassigns.
    compares = any(isinstance(one, ComparingSteering) for one in steerings)
    phases: list[Phase] = [Probe(replicas)] if replicas.has_probe else []
    phases += [Measure(replicas, values, losses, converge), converge]
    if compares or is_traced:
        phases.append(Describe(values, reassign, is_traced))
    if steerings:
        phases.append(Steer(steering, tail))
    if compares or values.explores:
        phases.append(reassign)
    rounds = Rounds(phases, replicas, values, losses, settings.sync_every, settings.records)
    # What shards a model shows whole parameters in the place of its own while it computes.
    watch = ParameterWatch(
        optimizer,
        None if replicas.is_sharded else getattr(replicas, "model", model),
        is_partitioned=partitioning_layer(layers) is not None,
    )
    return Parts(
        settings=settings,
        optimizer=optimizer,
        scheduler=scheduler,
        replicas=replicas,
        values=values,
        losses=losses,
        steering=steering,
        tail=tail,
        converge=converge,
        reassign=reassign,
        rounds=rounds,
        watch=watch,
        warn=warn,
        peaks=[
            [peak_rate(optimizer.param_groups[slot.group_index]) for slot in tunable.slots]
            for tunable in values.learning_rates
        ],
        is_traced=is_traced,
        has_rounds=bool(steerings) or is_recorded or replicas.needs_syncs or is_local,
    )

"""Builds the parts of an ensemble from the user's arguments, with nothing of the user's changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from hdet.checks import require_number
from hdet.ensemble.merging import Merging
from hdet.ensemble.rounds import ParameterWatch, Rounds
from hdet.ensemble.settings import Settings, check_objects
from hdet.ensemble.state import Schedule
from hdet.ensemble.sync import Converge, Describe, LossTable, Measure, Phase, Reassign, Score, Steer
from hdet.errors import WarnOnce
from hdet.explore import ExploredValues, LearningRate
from hdet.explore.values import hyperparameters_of
from hdet.method.recipe import tail_steps
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
from hdet.replicas.refusals import OPTIMIZERS, refuse
from hdet.replicas.tail import Tail
from hdet.replicas.tensors import parameters_of
from hdet.steering import STEERINGS, Controllers, Surroundings
from hdet.steering.comparing import ComparingSteering
from hdet.steering.needs import require_apart
from hdet.weak_hook import Closing


class Parts(Closing):
    """Has the parts of an ensemble, which know each other. :class:`hdet.Ensemble` puts them to work.

    Building them is collective. An error on one rank is an error on all, and nothing has changed then.

    Args:
        optimizer: the user's, in its wrappers.
        scheduler: the user's, in its wrappers.
        model: the user's, in its wrappers.
        replicas: what joins the replicas, or the replicas themselves.
        patience: seconds until a missing replica is named.
        **options: the fields of :class:`Settings`.
    """

    optimizer: Optimizer
    """The inner one, which makes the steps."""
    replicas: Replicas
    tail: Tail | None

    def __init__(
        self, optimizer: Any, scheduler: Any, model: Any, replicas: Any, *, patience: float, **options: Any
    ) -> None:
        is_built = isinstance(replicas, Replicas)
        group = ReplicaGroup(0, 1)
        if not is_built:
            group = ReplicaGroup.of_parameters(replicas, parameters_of(optimizer_layers(optimizer)[-1]))
            group = replace(group, patience=require_number("patience", patience, above=0))
        with raising_together(group):
            layers = optimizer_layers(optimizer)
            self.optimizer, model = layers[-1], plain_model(model)
            self.scheduler: Schedule | None = plain_scheduler(scheduler)
            check_objects(layers, self.scheduler, model)
            explore = options["explore"]
            options["explore"] = [LearningRate()] if explore is None else hyperparameters_of(explore)
            if options["total_steps"] is None:
                options["total_steps"] = getattr(self.scheduler, "total_steps", None)
            self.settings = settings = Settings(**options)
            if settings.probe is not None and model is None and not is_built:
                raise ValueError("model must be given with a probe, got None: it is what the probe scores")
            if is_built:
                self.replicas = replicas
            else:
                self.replicas = self._ranks(group, model, layers)
            kinds = {kind.kind: kind for kind in STEERINGS}
            chosen = sorted(settings.controllers, key=lambda one: STEERINGS.index(kinds[type(one)]))
            further = [one for controller in chosen for one in kinds[type(controller)].explores]
            self.explored = ExploredValues([*settings.explore, *further], self.optimizer)
            if (self.explored.explores or settings.is_local) and self.replicas.has_others:
                refuse("optimizer", layers, OPTIMIZERS, "differ")
            require_apart(chosen, self.explored)
            self.warn = WarnOnce(is_silent=not self.replicas.is_writer)
            around = Surroundings(
                values=self.explored,
                replicas=self.replicas,
                warn=self.warn,
                sync_every=settings.sync_every,
                total_steps=settings.total_steps,
            )
            self.controllers = Controllers([kinds[type(one)](one, around) for one in chosen])
            moments = settings.moments_for(self.optimizer, self.explored)
            self.settings = settings = replace(settings, moments=moments)
            self.tail = None
            if settings.total_steps and (steps := tail_steps(settings.total_steps, settings.average_tail)):
                self.tail = Tail(self.replicas, steps)
            self.merging = Merging(self.replicas, settings.rule, settings.is_local, moments == "keep")
            self.reassign = Reassign(self.replicas, self.explored, settings)
            self.reassign.positions(0)  # raises if the assignment does not fit
        self.replicas.require_same(settings.compared())
        with raising_together(group):
            for one in self.controllers:
                one.try_out()
        # Records may be given to replica zero alone: every replica then takes part in its rounds.
        is_recorded = self.replicas.any(settings.records is not None)
        self.is_traced = settings.records is not None and self.replicas.is_writer
        """Records tell the base of every step."""
        self.has_rounds = (
            len(self.controllers) > 0 or is_recorded or self.replicas.needs_syncs or settings.is_local
        )
        """There are syncs, also where replicas do not differ."""
        self.losses = LossTable(self.replicas.count)
        self.rounds = Rounds(
            self._phases(), self.replicas, self.explored, self.losses, settings.sync_every, settings.records
        )
        # What shards a model shows whole parameters in the place of its own while it computes.
        self.watch = ParameterWatch(
            self.optimizer,
            None if self.replicas.is_sharded else self.replicas.model,
            is_partitioned=partitioning_layer(layers) is not None,
        )
        self.peaks = [
            [peak_rate(self.optimizer.param_groups[slot.group_index]) for slot in tunable.slots]
            for tunable in self.explored.learning_rates
        ]
        """Of every slot of every learning rate, as asked for."""

    def _ranks(self, group: ReplicaGroup, model: Any, layers: Any) -> RankReplicas:
        settings, optimizer = self.settings, self.optimizer
        if settings.is_local:
            require_local_gradients(group, parameters_of(optimizer), model)
        return RankReplicas(
            group, optimizer, model, probe=settings.probe, bucket_mib=settings.bucket_mib, layers=layers
        )

    def _phases(self) -> list[Phase]:
        """List the phases of a sync. A recipe that never diverges neither describes nor reassigns."""
        replicas, explored, merging = self.replicas, self.explored, self.merging
        compares = any(isinstance(one, ComparingSteering) for one in self.controllers)
        phases: list[Phase] = []
        if replicas.probe is not None:
            phases.append(Score(replicas, ends_round=not merging.rule.compares_losses))
        phases.append(Measure(replicas, explored, self.losses, merging.is_local))
        phases.append(Converge(replicas, self.tail, merging))
        if compares or self.is_traced:
            phases.append(Describe(explored, self.reassign, self.is_traced))
        if len(self.controllers):
            phases.append(Steer(self.controllers, self.tail))
        if compares or explored.explores:
            phases.append(self.reassign)
        return phases

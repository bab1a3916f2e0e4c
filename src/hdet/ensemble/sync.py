"""A sync as a list of phases: probe, measure, converge, describe, steer, reassign."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Protocol

from hdet.ensemble.merging import Merging
from hdet.ensemble.settings import Settings
from hdet.errors import AllReplicasFailedError
from hdet.explore import ExploredValues
from hdet.method.exclusion import outliers
from hdet.method.fan_out import assign
from hdet.records import RoundRecord
from hdet.replicas import Replicas, Report
from hdet.replicas.losses import NOTHING, LossSum
from hdet.replicas.tail import Tail
from hdet.steering import Controllers

_LEAST_LOSSES = 20
"""A mean over fewer losses is too noisy to say that a replica has fallen behind."""


class LossTable:
    """The losses of every replica in this round, the same in every process.

    >>> table = LossTable(2)
    >>> table.add([LossSum(3.0, 2.0, 0.0), LossSum(0.0, 0.0, 1.0)])
    >>> table.means
    [1.5, None]
    """

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self.means: list[float | None] = []
        """Of every replica when losses were added last; None where it saw no finite one."""
        self.clear()

    def clear(self, rows: Sequence[Sequence[float]] = ()) -> None:
        """Begin a round, or continue one from a saved table.

        The table belongs to the replicas that filled it: for another number of them it is dropped.
        """
        self.rows = [NOTHING] * self._num_replicas
        if len(rows) == self._num_replicas:
            self.rows = [LossSum(*row) for row in rows]

    def add(self, losses: Sequence[LossSum]) -> None:
        """Add the losses of every replica since the last exchange."""
        self.rows = [LossSum(*map(add, row, one)) for row, one in zip(self.rows, losses, strict=True)]
        self.means = [row.total / row.num_finite if row.num_finite else None for row in self.rows]

    def forget(self, replica: int) -> None:
        """Drop what a replica has seen in this round: it was of parameters that are gone."""
        self.rows[replica] = NOTHING


@dataclass
class Sync:
    """One sync, and what its phases have learnt so far."""

    record: RoundRecord
    joins: bool
    """Leave all replicas with the same weights: before a save, and at the end of the run."""
    probes: Sequence[float] | None = None
    """Losses on the probe of the replicas that live here; None where they were not scored."""
    reports: Sequence[Report] = ()
    scores: list[float | None] = field(default_factory=list)
    """Replicas are compared by these: their losses, or those on the probe."""
    has_merged: bool = False
    """Replicas have taken something from each other."""
    leaves_equal: bool = True
    """Nothing differs between replicas now, so that one speaks for all."""


class Phase(Protocol):
    """One part of a sync."""

    name: str
    """Its time is counted under this."""
    ends_round: bool
    """It belongs to the end of a round only, and not to ``converge()`` within one."""

    def run(self, sync: Sync) -> None:
        """Do it, and tell the record. Collective."""


@dataclass(eq=False)
class Score:
    """Score the replicas on the same data, where they differ: only then are they compared."""

    replicas: Replicas
    ends_round: bool
    """False where a merge rule compares replicas also before a save."""
    name = "probe"

    def run(self, sync: Sync) -> None:
        """Ask for the scores."""
        if self.replicas.differ:
            sync.probes = self.replicas.score()


@dataclass(eq=False)
class Measure:
    """Look at the replicas: one small exchange, and who is left out."""

    replicas: Replicas
    losses: LossTable
    """They are of this round."""
    is_local: bool
    """Tells if each replica has its own gradients, so that one can fall behind."""
    name = "measure"
    ends_round = False

    def run(self, sync: Sync) -> None:
        """Fill in losses, scores and those that are left out."""
        record, losses = sync.record, self.losses
        reports = self.replicas.report(record.step, sync.probes)
        sync.reports = reports
        losses.add([report.losses for report in reports])
        finds_outliers = record.ends_round and self.is_local
        record.excluded = excluded_replicas(losses, reports, record.step, finds_outliers=finds_outliers)
        record.losses = losses.means
        record.num_nonfinite_losses = [int(row.num_nonfinite) for row in losses.rows]
        record.probes = [] if sync.probes is None else [report.finite_score for report in reports]
        sync.scores = record.probes or record.losses
        for r, report in enumerate(reports):
            if not report.is_equal:
                losses.forget(r)


def excluded_replicas(
    table: LossTable, reports: Sequence[Report], num_steps: int, *, finds_outliers: bool = False
) -> dict[int, str]:
    """Name the replicas that are left out of weights and mean, with the reason; raise if none is healthy.

    Args:
        table: losses of the round.
        reports: what is known of each.
        num_steps: where the ensemble stands.
        finds_outliers: leave those out too whose loss is far above the others'.
    """
    excluded: dict[int, str] = {}
    for r, (row, report) in enumerate(zip(table.rows, reports, strict=True)):
        if not report.is_finite:
            excluded[r] = "parameters are not finite"
        elif not report.is_equal:
            excluded[r] = "parameters differ from the other replicas'"
        elif row.num_nonfinite and not row.num_finite:
            excluded[r] = "no finite loss in this round"
        elif report.score is not None and not math.isfinite(report.score):
            excluded[r] = "the loss on the probe is not finite"
    if len(excluded) == len(reports):
        reasons = "; ".join(f"replica {r}: {why}" for r, why in excluded.items())
        one_batch = (
            ". If it was one rank's batch, DistributedDataParallel has spread its NaN to all: register "
            "hdet.finite_mean_hook"
        )
        raise AllReplicasFailedError(
            f"at step {num_steps} no replica is healthy ({reasons}). Nothing was averaged or saved: resume "
            f"from the last checkpoint with a lower learning rate{one_batch if len(reports) > 1 else ''}"
        )
    if finds_outliers:
        healthy = [
            mean if r not in excluded and row.num_finite >= _LEAST_LOSSES else None
            for r, (row, mean) in enumerate(zip(table.rows, table.means, strict=True))
        ]
        excluded |= dict.fromkeys(sorted(outliers(healthy)), "its loss is far above the others'")
    return excluded


@dataclass(eq=False)
class Converge:
    """Average the replicas (paper, eq. 3), and heal those that ought to be equal to the others."""

    replicas: Replicas
    tail: Tail
    """Is averaged along."""
    merging: Merging
    """Does it where gradients are local."""
    name = "converge"
    ends_round = False

    def run(self, sync: Sync) -> None:
        """Give every replica the mean over those that are not left out, or what the merge rule says."""
        replicas, tail, record = self.replicas, self.tail, sync.record
        like_weights = tail.averaged() if replicas.has_others and tail.steps else ()
        if self.merging.is_local:
            self.merging.merge(sync, like_weights)
        else:
            sync.has_merged = replicas.average(record.excluded, like_weights=like_weights)
        spoilt = [r for r, report in enumerate(sync.reports) if not (report.is_finite and report.is_equal)]
        if spoilt:
            tail.replicas_healed(spoilt, record.step)
        record.converged = replicas.has_others and sync.has_merged


@dataclass(eq=False)
class Describe:
    """Tell the record which values the replicas had in this round."""

    values: ExploredValues
    is_traced: bool
    """Tells if the record keeps the base of every step."""
    name = "measure"
    ends_round = False

    def run(self, sync: Sync) -> None:
        """Write positions, multipliers and values, and the trace of the base."""
        record = sync.record
        for tunable in self.values.tunables:
            record.positions[tunable.name] = tunable.places
            record.multipliers[tunable.name] = tunable.each_multiplier
            record.values[tunable.name] = [tunable.value_with(rho) for rho in tunable.each_multiplier]
            if self.is_traced:
                # At a sync the schedule has not moved on. Within a round its newest value is not used yet.
                record.base_trace |= tunable.take_trace(keep_newest=not record.ends_round)


@dataclass(eq=False)
class Steer:
    """Let the controllers move the shared values."""

    controllers: Controllers
    tail: Tail
    """Begins again where the run goes back to earlier weights."""
    name = "steer"
    ends_round = True

    def run(self, sync: Sync) -> None:
        """Let each decide by what the record tells. Where one goes back, the others only take note of it."""
        has_gone_back = False
        for one in self.controllers.each:
            if has_gone_back:
                one.went_back()
            elif one.sync(sync.record):
                has_gone_back = True
                self.tail.forget()


@dataclass(eq=False)
class Reassign:
    """Fan out: give every replica its place in the spreads of the next round (paper, eqs. 1 and 9)."""

    replicas: Replicas
    values: ExploredValues
    settings: Settings
    """Tell how replicas are placed."""
    name = "steer"
    ends_round = True

    def positions(self, round_index: int) -> dict[str, list[float]]:
        """Place every replica in every spread, from -1 to 1."""
        names, told = [tunable.name for tunable in self.values.tunables], self.settings
        design = (told.assignment, self.replicas.count, told.seed, round_index, names, told.num_fixed_rounds)
        return assign(*design)

    def run(self, sync: Sync) -> None:
        """Draw the multipliers of the next round."""
        self.draw(sync.record.step)

    def draw(self, num_steps: int, *, narrows: bool = True) -> None:
        """Draw the multipliers of the round that begins after so many steps, and tell the slots."""
        positions, index = self.positions(num_steps // self.settings.sync_every), self.replicas.index
        for tunable in self.values.tunables:
            if narrows:
                tunable.narrow_spread()
            tunable.fan_out(positions[tunable.name], index)
        used = self.replicas.place({t.name: t.each_multiplier for t in self.values.tunables})
        for tunable in self.values.tunables:
            tunable.used_multiplier = used[tunable.name]
            tunable.set_slots()

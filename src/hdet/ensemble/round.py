"""Rounds: what one sync does. Measure, converge, steer, reassign."""

from __future__ import annotations

from typing import Literal

from torch.autograd.profiler import record_function

from hdet.ensemble.exclusion import excluded_replicas
from hdet.ensemble.loss_table import LossTable
from hdet.ensemble.merging import Merging
from hdet.ensemble.steering import Steering
from hdet.ensemble.stopwatch import Stopwatch
from hdet.ensemble.tail import Tail
from hdet.explore import ExploredValues
from hdet.method.assign import assign
from hdet.records import RoundRecord
from hdet.replicas import Replicas


class Rounds:
    """The rounds of a run, one after the other.

    Args:
        replicas: who takes part.
        values: what is explored.
        losses: what replicas have seen in this round.
        steering: what moves the base.
        tail: what averages the last steps.
        merging: what replicas take from each other.
        sync_every: steps per round, T.
        seed: of the assignments.
        assignment: how replicas are placed in the spreads.
        is_recorded: whether records keep the base of every step.
    """

    def __init__(
        self,
        replicas: Replicas,
        values: ExploredValues,
        losses: LossTable,
        steering: Steering,
        tail: Tail,
        merging: Merging,
        *,
        sync_every: int,
        seed: int,
        assignment: Literal["random", "latin", "factorial"],
        is_recorded: bool,
    ) -> None:
        self._replicas, self._values, self._losses = replicas, values, losses
        self._steering, self._tail, self._merging = steering, tail, merging
        self._sync_every, self._seed, self._assignment = sync_every, seed, assignment
        self._is_recorded = is_recorded
        self._recorded_at, self._counted_bytes = 0, 0
        self.converged_at = 0
        """The step after which replicas were made equal last."""

    def begin_at(self, num_steps: int, *, narrows: bool = True) -> None:
        """Begin, or begin again, after this many optimizer steps, with the bases as they are.

        Args:
            num_steps: optimizer steps so far.
            narrows: fit the spreads into their bounds; not where a checkpoint has told how.
        """
        with self._values.rewriting(is_traced=self._is_recorded):
            self._recorded_at = self.converged_at = num_steps
            self._counted_bytes = self._replicas.bytes_sent
            self._replicas.clear_losses()
            self._losses.clear()
            for slot in self._values.slots:
                slot.trace.clear()
            self._reassign(num_steps // self._sync_every, narrows=narrows)

    def sync(self, num_steps: int, *, is_end: bool) -> RoundRecord:
        """The step that ends a round, and the last one the run. Collective."""
        record = self._measure_and_converge(num_steps, ends_round=True, joins=is_end)
        stopwatch = Stopwatch()
        with record_function("hdet::steer"):
            self._steering.sync(record)
            if self._steering.has_gone_back:
                self._tail.forget()
            self._losses.clear()
            self._reassign(num_steps // self._sync_every)
        stopwatch.lap("steer", record)
        return record

    def converge(self, num_steps: int) -> RoundRecord:
        """Average within a round; multipliers and controller are left as they are. Collective."""
        return self._measure_and_converge(num_steps, ends_round=False, joins=True)

    def positions(self, round_index: int) -> dict[str, list[float]]:
        """Where every replica stands in every spread, from -1 to 1."""
        names = [tunable.name for tunable in self._values.tunables]
        return assign(self._assignment, self._replicas.count, self._seed, round_index, names)

    # --- the parts of a sync -------------------------------------------------------------------------

    def _measure_and_converge(self, num_steps: int, *, ends_round: bool, joins: bool) -> RoundRecord:
        stopwatch = Stopwatch()
        round_index = max(0, num_steps - 1) // self._sync_every
        record = RoundRecord(
            round=round_index, step=num_steps, num_replicas=self._replicas.count, ends_round=ends_round
        )
        scores = None
        if ends_round and self._wants_scores:
            with record_function("hdet::probe"):
                scores = self._replicas.score()
            stopwatch.lap("probe", record)
        with record_function("hdet::measure"):
            reports = self._replicas.report(num_steps, self._values.base, scores)
            self._losses.add([report.losses for report in reports])
            record.excluded = excluded_replicas(
                self._losses, reports, num_steps, finds_outliers=self._merging.is_local and ends_round
            )
        stopwatch.lap("measure", record)
        with record_function("hdet::converge"):
            has_merged = self._merging.merge(
                record,
                self._losses.means if scores is None else [report.finite_score for report in reports],
                [report.gradient_norm for report in reports],
                joins=joins,
                like_weights=self._tail.averaged(),
            )
        spoilt = [r for r, report in enumerate(reports) if not (report.is_finite and report.is_equal)]
        self._tail.replicas_healed(spoilt, num_steps)
        record.converged = self._replicas.has_others and has_merged
        stopwatch.lap("converge", record)
        if joins or self._merging.leaves_equal:
            self.converged_at = num_steps
        record.losses = self._losses.means
        record.num_nonfinite_losses = [int(row.num_nonfinite) for row in self._losses.rows]
        for r, report in enumerate(reports):
            if not report.is_equal:
                self._losses.forget(r)
        record.probes = [report.finite_score for report in reports] if scores is not None else []
        self._describe_values(record)
        record.num_steps, self._recorded_at = num_steps - self._recorded_at, num_steps
        sent = self._replicas.bytes_sent
        record.bytes_sent, self._counted_bytes = sent - self._counted_bytes, sent
        return record

    @property
    def _wants_scores(self) -> bool:
        """Whether a sync has a use for the probe: only replicas that differ are compared."""
        return self._replicas.has_probe and self._replicas.differ

    def _describe_values(self, record: RoundRecord) -> None:
        record.positions = self.positions(record.round)
        for tunable in self._values.tunables:
            multipliers = tunable.multipliers(record.positions[tunable.name])
            record.multipliers[tunable.name] = multipliers
            record.values[tunable.name] = [tunable.value_with(rho) for rho in multipliers]
            if self._is_recorded:
                # At a sync the schedule has not moved on. Within a round its newest value is not used yet.
                record.base_trace |= tunable.take_trace(keep_newest=not record.ends_round)

    def _reassign(self, round_index: int, *, narrows: bool = True) -> None:
        """Draw this round's multipliers and tell the slots."""
        positions, index = self.positions(round_index), self._replicas.index
        multipliers = {}
        for tunable in self._values.tunables:
            if narrows:
                tunable.narrow_spread()
            multipliers[tunable.name] = tunable.multipliers(positions[tunable.name])
            tunable.position = positions[tunable.name][index]
            tunable.multiplier = multipliers[tunable.name][index]
        self._values.use(self._replicas.place(multipliers))

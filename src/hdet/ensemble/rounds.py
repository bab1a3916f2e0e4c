"""Rounds: runs the syncs of a run, one after the other."""

from __future__ import annotations

import logging
import time

from torch.autograd import profiler

from hdet.ensemble.merging import Merging
from hdet.ensemble.settings import Settings
from hdet.ensemble.sync import (
    Converge,
    Describe,
    LossTable,
    Measure,
    Phase,
    Reassign,
    Score,
    Steer,
    Sync,
)
from hdet.explore import ExploredValues
from hdet.records import RoundRecord
from hdet.replicas import Replicas
from hdet.replicas.tail import Tail
from hdet.steering import Controllers

_log = logging.getLogger(__name__)


class Rounds:
    """Runs the rounds of a run, one after the other.

    Args:
        settings: of the ensemble.
        replicas: take part.
        values: are explored.
        controllers: steer.
        tail: is averaged along with the weights.
    """

    def __init__(
        self,
        settings: Settings,
        replicas: Replicas,
        values: ExploredValues,
        controllers: Controllers,
        tail: Tail,
    ) -> None:
        self._replicas, self._values, self._controllers = replicas, values, controllers
        self._sync_every, self._sink = settings.sync_every, settings.records
        self.is_traced = settings.records is not None and replicas.is_writer
        """Records tell the base of every step."""
        self.are_needed = len(controllers) > 0 or replicas.needs_syncs or settings.is_local
        """There are syncs, also where replicas do not differ and nothing is recorded."""
        self.losses = LossTable(replicas.count)
        """They are of this round."""
        rule, is_local = settings.rule, settings.is_local
        self.merging = Merging(replicas, rule, is_local, settings.moments == "keep")
        """Lets replicas take from each other where gradients are local."""
        self._reassign = Reassign(replicas, values, settings)
        self._reassign.positions(0)  # raises if the assignment does not fit
        compares = any(one.compares for one in controllers)
        # A recipe that never diverges neither describes nor reassigns.
        phases: list[tuple[bool, Phase]] = [
            (replicas.probe is not None, Score(replicas, ends_round=not rule.compares_losses)),
            (True, Measure(replicas, self.losses, is_local)),
            (True, Converge(replicas, tail, self.merging)),
            (compares or self.is_traced, Describe(values, self.is_traced)),
            (len(controllers) > 0, Steer(controllers, tail)),
            (compares or values.explores, self._reassign),
        ]
        self._phases = [phase for is_needed, phase in phases if is_needed]

    def begin_at(self, num_steps: int, *, narrows: bool, begins_equal: bool) -> None:
        """Begin, or begin again, after this many optimizer steps.

        Args:
            num_steps: optimizer steps so far.
            narrows: begin with as much of each spread as its bounds allow; else with that of a checkpoint.
            begins_equal: whether replicas hold the same weights.
        """
        self.merging.begin(begins_equal=begins_equal)
        self.converged_at = self._recorded_at = num_steps
        self._counted_bytes = self._replicas.traffic.num_bytes
        self._replicas.clear_losses()
        self.losses.clear()
        with self._values.rewriting(is_traced=self.is_traced):
            for slot in self._values.slots:
                slot.trace.clear()
            self._reassign.draw(num_steps, narrows=narrows)
            self._controllers.begin(num_steps)

    def run(self, num_steps: int, *, ends_round: bool, joins: bool) -> RoundRecord:
        """Sync at the end of a round, or within one. Collective."""
        record = RoundRecord(
            round=max(0, num_steps - 1) // self._sync_every,
            step=num_steps,
            num_replicas=self._replicas.count,
            ends_round=ends_round,
        )
        sync = Sync(record, joins)
        is_profiled = profiler._is_profiler_enabled  # noqa: SLF001
        try:
            for phase in self._phases:
                if ends_round or not phase.ends_round:
                    began = time.perf_counter()
                    if is_profiled:
                        with profiler.record_function(f"hdet::{phase.name}"):
                            phase.run(sync)
                    else:
                        phase.run(sync)
                    spent = 1000 * (time.perf_counter() - began)
                    record.milliseconds[phase.name] = record.milliseconds.get(phase.name, 0.0) + spent
        except BaseException:
            # Leave the user's DistributedDataParallel as it was: the run cannot go on.
            self._replicas.share_gradients(True)
            raise
        if joins or sync.leaves_equal:
            self.converged_at = num_steps
        if ends_round:
            self.losses.clear()
        sent = self._replicas.traffic.num_bytes
        record.bytes_sent, self._counted_bytes = sent - self._counted_bytes, sent
        record.num_steps, self._recorded_at = num_steps - self._recorded_at, num_steps
        return record

    def write(self, record: RoundRecord) -> None:
        """Add the bases as they are now, and hand the record on."""
        if not self._replicas.is_writer:
            return
        for replica, why in record.excluded.items():
            _log.warning("step %d: replica %d left out: %s", record.step, replica, why)
        if self._sink is None and not _log.isEnabledFor(logging.INFO):
            return
        for tunable in self._values.tunables:
            record.base[tunable.name] = tunable.base
            scheduled = tunable.slots[0].scheduled
            record.correction[tunable.name] = tunable.base / scheduled if scheduled else 1.0
        if self._sink is not None:
            self._sink.write(record)
        _log.info("step %d: losses %s, base %s", record.step, record.losses, record.base)

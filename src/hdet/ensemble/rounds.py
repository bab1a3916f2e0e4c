"""Counts the steps of a run, watches its parameters, and runs its rounds."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.autograd import profiler
from torch.optim import Optimizer

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
from hdet.errors import HdetError, WarnOnce
from hdet.explore import ExploredValues
from hdet.records import RoundRecord
from hdet.replicas import Replicas
from hdet.replicas.tail import Tail
from hdet.replicas.tensors import ParameterList, local_part, parameters_of
from hdet.steering import Controllers

_log = logging.getLogger(__name__)

_MOST_BEFORE_THE_FIRST_CALL = 4
"""Loading a distributed checkpoint, among others, makes a step or two that change nothing."""

NOTICES = {
    "past the end": "step() was called after total_steps={total_steps} steps: the schedule stays at its last "
    "value. Pass the true number of steps as total_steps",
    "after finish": "step() was called after finish(), which ended the run at step {num_steps}: from here on "
    "there is no mean of the last weights",
    "changed outside": "the learning rate, or another value that hdet sets, was changed by something other "
    "than hdet since the last step: remove your own scheduler and what else writes it. "
    "hdet.Ensemble(scheduler=...) takes a schedule of yours, and found.write(optimizer) gives it what was "
    "found",
}
"""A call of ``step`` warns of these, each once."""


class StepCounter:
    """Sees the optimizer step, and tells which calls count.

    Until the first step of the optimizer is seen, calls count, so that a schedule can be looked at without
    training. Not so where there are gradients that have moved nothing: the step was skipped, as by a gradient
    scaler that begins with too large a scale.

    Args:
        parameters: what is trained.
        warn: tells the user, once, that calls come between the backward pass and the step of the optimizer.
    """

    def __init__(self, parameters: Sequence[Tensor], warn: WarnOnce) -> None:
        self._parameters = parameters
        self._warn = warn
        self._versions = _versions(parameters)
        self.has_seen_steps = False
        """Tells if the optimizer was ever seen to step."""
        self.has_moved = True
        """Tells if parameters may have changed since replicas were averaged. At first nobody knows."""
        self._num_uncounted = 0
        self._is_called = False
        self._may_be_early = False  # until the first call that counts
        self._used: tuple[Tensor, Tensor, int] | None = None

    def optimizer_stepped(self) -> None:
        """Note a step of the optimizer. Raises if the one before was not counted."""
        self.has_seen_steps = True
        self.has_moved = True
        self._num_uncounted += 1
        if self._may_be_early:
            self._used = next(filter(None, map(_gradient, self._parameters)), None)
        if self._num_uncounted > (1 if self._is_called else _MOST_BEFORE_THE_FIRST_CALL):
            made = f"the optimizer has made {self._num_uncounted}"
            since = f"{made} since the last call" if self._is_called else f"it was never called, and {made}"
            raise HdetError(
                f"step(loss) must be called after every optimizer step, but {since}: call it in the training "
                "loop, not once per epoch. In Lightning return "
                '{"scheduler": ..., "interval": "step"}'
            )

    def takes_call(self) -> bool:
        """Tell if the optimizer has stepped since the last call."""
        is_first = not self._is_called
        has_stepped = self._num_uncounted > 0
        self._is_called = True
        self._num_uncounted = 0
        if has_stepped and self._may_be_early:
            self._judge_order()
        counts = has_stepped or not (self.has_seen_steps or self._is_skipped())
        if is_first:
            self._may_be_early = not counts
        return counts

    def _judge_order(self) -> None:
        """See whether there are newer gradients than those that the optimizer has used.

        The first call did not count: the step was skipped, or is still to come at every call.
        """
        used = self._used
        self._used = None
        self._may_be_early = False
        now = _gradient(used[0]) if used is not None else None
        if used is None or now is None or (now[1] is used[1] and now[2] == used[2]):
            return
        if bool(local_part(now[1]).any()):  # else it is zero_grad's
            self._warn(
                "order",
                "step() must be called after optimizer.step(), but it was called between backward() and "
                "optimizer.step(). So it counts one step too few, and the run does not come to its end: move "
                "the call below optimizer.step()",
            )

    def _is_skipped(self) -> bool:
        before = self._versions
        self._versions = _versions(self._parameters)
        return before == self._versions and any(p.grad is not None for p in self._parameters)


def _versions(parameters: Sequence[Tensor]) -> list[int]:
    """Give numbers that grow whenever a parameter is written. No device is asked."""
    return [p._version for p in parameters]  # noqa: SLF001


def _gradient(parameter: Tensor) -> tuple[Tensor, Tensor, int] | None:
    """Give a parameter with its gradient and that one's version. Tensors of inference mode have none."""
    gradient = parameter.grad
    if gradient is None or gradient.is_inference():
        return None
    return parameter, gradient, gradient._version  # noqa: SLF001


class ParameterWatch:
    """Notices parameters that come or go while an ensemble drives their optimizer: it cannot follow them.

    Args:
        optimizer: what trains.
        model: whose parameters they are; None if it is not known, or shows others while it computes.
        is_partitioned: the optimizer holds copies of a part of them, which its wrapper may replace.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None, *, is_partitioned: bool) -> None:
        self._optimizer = optimizer
        self._of_model = ParameterList(model)
        self._is_partitioned = is_partitioned
        self._num_groups = len(optimizer.param_groups)
        self._trained = parameters_of(optimizer)
        self._known = self._of_model.now()  # kept, so that no other gets the same id

    def require_same_groups(self) -> None:
        """Raise where groups were added to the optimizer. It costs next to nothing."""
        if len(self._optimizer.param_groups) != self._num_groups:
            raise HdetError(
                f"the optimizer had {self._num_groups} parameter groups when the ensemble was built, but it "
                f"has {len(self._optimizer.param_groups)} now: build the ensemble after add_param_group()"
            )

    def require_same(self) -> None:
        """Raise where parameters were replaced, removed or added. It looks at each of them."""
        if (now := self._of_model.now()) is not self._known:
            self._require_known(now)
        trained = parameters_of(self._optimizer)
        is_same = len(trained) == len(self._trained) and all(map(operator.is_, trained, self._trained))
        if not (is_same or self._is_partitioned):
            raise HdetError(
                "the optimizer must hold the parameters that it had when the ensemble was built, but they "
                "were changed: build the ensemble after changing them"
            )

    def _require_known(self, parameters: Sequence[Tensor]) -> None:
        known, now = ({id(p): p for p in each} for each in (self._known, parameters))
        num_gone = len(known.keys() - now.keys())
        num_new = sum(now[i].requires_grad for i in now.keys() - known.keys())
        if num_gone or num_new:
            what = "replaced" if num_gone else "added"
            raise HdetError(
                f"{max(num_gone, num_new)} parameters of the model were {what} after the ensemble was built, "
                "so that the optimizer does not train what the model uses: build the optimizer and the "
                "ensemble after changing the model"
            )


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
        try:
            for phase in self._phases:
                if ends_round or not phase.ends_round:
                    began = time.perf_counter()
                    with _named(phase.name):
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


def _named(phase: str) -> AbstractContextManager[Any]:
    """Name a phase in a profile, where one is made."""
    is_profiled = profiler._is_profiler_enabled  # noqa: SLF001
    return profiler.record_function(f"hdet::{phase}") if is_profiled else nullcontext()

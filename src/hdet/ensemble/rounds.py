"""Which calls of ``step`` count, and what the rounds of a run are: StepCounter and Rounds."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Sequence

from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from hdet.ensemble.sync import LossTable, Phase, Sync
from hdet.errors import HdetError
from hdet.explore import ExploredValues
from hdet.records import RecordSink, RoundRecord
from hdet.replicas import Replicas
from hdet.replicas.tensors import local_part, parameters_of

_log = logging.getLogger(__name__)

_MOST_BEFORE_THE_FIRST_CALL = 4
"""Loading a distributed checkpoint, among others, makes a step or two that change nothing."""


class StepCounter:
    """Sees the optimizer step, and tells which calls count.

    Until the first step of the optimizer is seen, calls count, so that a schedule can be looked at without
    training. Not so where there are gradients that have moved nothing: the step was skipped, as by a gradient
    scaler that begins with too large a scale.

    Args:
        parameters: what is trained.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters, self._versions = parameters, _versions(parameters)
        self.has_seen_steps = False
        """Whether the optimizer was ever seen to step."""
        self.has_moved = True
        """Whether parameters may have changed since replicas were averaged. At first nobody knows."""
        self._num_uncounted, self._is_called = 0, False
        self.is_called_early = False
        """Whether calls were seen to come between the backward pass and the step of the optimizer."""
        self._may_be_early = False  # until the first call that counts
        self._used: tuple[Tensor, Tensor, int] | None = None

    def optimizer_stepped(self) -> None:
        """After every step of the optimizer. Raises if the one before was not counted."""
        self.has_seen_steps = self.has_moved = True
        self._num_uncounted += 1
        if self._may_be_early:
            self._used = next((_gradient(p) for p in self._parameters if _has_gradient(p)), None)
        if self._num_uncounted > (1 if self._is_called else _MOST_BEFORE_THE_FIRST_CALL):
            raise HdetError(
                f"step() must be called after every optimizer step, but the optimizer has made "
                f"{self._num_uncounted} since the last call: call it in the training loop, not once per "
                'epoch. In Lightning return {"scheduler": ..., "interval": "step"}'
            )

    def takes_call(self) -> bool:
        """Whether the optimizer has stepped since the last call."""
        is_first = not self._is_called
        has_stepped, self._num_uncounted, self._is_called = self._num_uncounted > 0, 0, True
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
        used, self._used, self._may_be_early = self._used, None, False
        if used is None or not _has_gradient(used[0]):
            return
        _, gradient, version = _gradient(used[0])
        is_newer = gradient is not used[1] or version != used[2]
        self.is_called_early = is_newer and bool(local_part(gradient).any())  # else it is zero_grad's

    def _is_skipped(self) -> bool:
        before, self._versions = self._versions, _versions(self._parameters)
        return before == self._versions and any(p.grad is not None for p in self._parameters)


def _versions(parameters: Sequence[Tensor]) -> list[int]:
    """Numbers that grow whenever a parameter is written. No device is asked."""
    return [_version(p) for p in parameters]


def _version(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and not parameter.grad.is_inference()  # these have no version


def _gradient(parameter: Tensor) -> tuple[Tensor, Tensor, int]:
    assert parameter.grad is not None
    return parameter, parameter.grad, _version(parameter.grad)


class ParameterWatch:
    """Notices parameters that come or go while an ensemble drives their optimizer: it cannot follow them.

    Args:
        optimizer: what trains.
        model: whose parameters they are; None if it is not known, or shows others while it computes.
        is_partitioned: the optimizer holds copies of a part of them, which its wrapper may replace.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None, *, is_partitioned: bool) -> None:
        self._optimizer = optimizer
        self._model = model
        self._is_partitioned = is_partitioned
        self._num_groups = len(optimizer.param_groups)
        self._trained = parameters_of(optimizer)
        self._known = {id(p): p for p in self._parameters()}  # kept, so that no other gets the same id

    def _parameters(self) -> list[Tensor]:
        return [] if self._model is None else list(self._model.parameters())

    def require_same_groups(self) -> None:
        """Raise where groups were added to the optimizer. It costs next to nothing."""
        if len(self._optimizer.param_groups) != self._num_groups:
            raise HdetError(
                f"the optimizer had {self._num_groups} parameter groups when the ensemble was built, but it "
                f"has {len(self._optimizer.param_groups)} now: build the ensemble after add_param_group()"
            )

    def require_same(self) -> None:
        """Raise where parameters were replaced, removed or added. It looks at each of them."""
        now, trained = {id(p): p for p in self._parameters()}, parameters_of(self._optimizer)
        num_gone = len(self._known.keys() - now.keys())
        num_new = sum(now[i].requires_grad for i in now.keys() - self._known.keys())
        if num_gone or num_new:
            what = "replaced" if num_gone else "added"
            raise HdetError(
                f"{max(num_gone, num_new)} parameters of the model were {what} after the ensemble was built, "
                "so that the optimizer does not train what the model uses: build the optimizer and the "
                "ensemble after changing the model"
            )
        is_same = len(trained) == len(self._trained) and all(map(operator.is_, trained, self._trained))
        if not (is_same or self._is_partitioned):
            raise HdetError(
                "the optimizer must hold the parameters that it had when the ensemble was built, but they "
                "were changed: build the ensemble after changing them"
            )


class Rounds:
    """The rounds of a run, one after the other.

    Args:
        phases: of a sync, in their order.
        replicas: who takes part.
        values: what is explored.
        losses: what replicas have seen in this round.
        sync_every: steps per round, T.
        sink: where records go; None for nowhere.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        replicas: Replicas,
        values: ExploredValues,
        losses: LossTable,
        *,
        sync_every: int,
        sink: RecordSink | None,
    ) -> None:
        self._phases, self._replicas, self._values, self._losses = phases, replicas, values, losses
        self._sync_every = sync_every
        self._sink = sink if replicas.is_writer else None
        self._recorded_at = self._counted_bytes = 0
        self.converged_at = 0
        """The step after which replicas were made equal last."""

    def begin_at(self, num_steps: int) -> None:
        """Begin, or begin again, after this many optimizer steps."""
        self._recorded_at = self.converged_at = num_steps
        self._counted_bytes = self._replicas.bytes_sent
        self._replicas.clear_losses()
        self._losses.clear()
        for slot in self._values.slots:
            slot.trace.clear()

    def run(self, num_steps: int, *, ends_round: bool, joins: bool) -> RoundRecord:
        """Sync at the end of a round, or within one. Collective."""
        record = RoundRecord(
            round=max(0, num_steps - 1) // self._sync_every,
            step=num_steps,
            num_replicas=self._replicas.count,
            ends_round=ends_round,
        )
        sync = Sync(record, joins)
        for phase in self._phases:
            if ends_round or not phase.ends_round:
                began = time.perf_counter()
                with record_function(f"hdet::{phase.name}"):
                    phase.run(sync)
                spent = 1000 * (time.perf_counter() - began)
                record.milliseconds[phase.name] = record.milliseconds.get(phase.name, 0.0) + spent
        if joins or sync.leaves_equal:
            self.converged_at = num_steps
        if ends_round:
            self._losses.clear()
        sent = self._replicas.bytes_sent
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
            if tunable.control is not None:
                record.velocity[tunable.name] = tunable.control.velocity
        if self._sink is not None:
            self._sink.write(record)
        _log.info("step %d: losses %s, base %s", record.step, record.losses, record.base)

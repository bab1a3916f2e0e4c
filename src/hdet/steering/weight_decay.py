"""Steering of the weight decay by held-out data."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import check_keys, check_numbers
from hdet.errors import NoEffectWarning
from hdet.explore import Tunable, WeightDecay
from hdet.method import weight_decay as rule
from hdet.records import RoundRecord
from hdet.replicas.optimizers import decay_per_step, peak_rate
from hdet.replicas.probe import require_scorable
from hdet.round_record import WeightDecayRecord
from hdet.steering.port import Steering, Surroundings

_log = logging.getLogger(__name__)


def decay_strength(tunable: Tunable, optimizer: Optimizer, total_steps: int) -> float:
    """Give weight decay times peak learning rate times steps, the mean over the parameters that decay."""
    total, count = 0.0, 0
    for slot in tunable.slots:
        group = optimizer.param_groups[slot.group_index]
        size = sum(p.numel() for p in group["params"] if p.requires_grad)
        rate = peak_rate(group) * slot.scheduled * decay_per_step(optimizer, group)
        total, count = total + size * rate, count + size
    return total / max(1, count) * total_steps


@dataclass(frozen=True, eq=False)
class _SharedWeightDecay(WeightDecay):
    """Has what is moved: one weight decay for all replicas and groups."""

    spread: float = 0.0
    per_group: bool = False
    title = rule.HeldOutWeightDecay.__name__
    steered_by = "weight_decay"


class WeightDecaySteering(Steering):
    """An :class:`hdet.HeldOutWeightDecay` at work: it looks at the probe now and then."""

    name = _SharedWeightDecay.steered_by
    kind = rule.HeldOutWeightDecay
    explores = (_SharedWeightDecay(),)
    settings: rule.HeldOutWeightDecay

    def __init__(self, settings: rule.HeldOutWeightDecay, around: Surroundings) -> None:
        super().__init__(settings, around)
        probe, total_steps = self.replicas.probe, around.total_steps
        assert probe is not None and total_steps is not None, "needed, and checked"
        self._total_steps = total_steps
        self._tunable = next((t for t in self.values.tunables if t.steered_by == self.name), None)
        self._planned = 0.0  # as the optimizer has it before anything else moves the learning rate
        if self._tunable is not None:
            self._planned = decay_strength(self._tunable, self.values.optimizer, total_steps)
            self._decayed(self._tunable)
            self._warn_of_few_looks(total_steps, around.sync_every)
            if probe.num_examples < rule.FEW_EXAMPLES:
                self.warn(
                    "few examples",
                    f"the probe has {probe.num_examples} examples, and with fewer than {rule.FEW_EXAMPLES} "
                    "what it says is mostly chance",
                    argument="probe",
                    remedy="give more held-out data",
                )

    def _warn_of_few_looks(self, total_steps: int, sync_every: int) -> None:
        num_looks = self.settings.num_looks(total_steps / sync_every)
        if num_looks < 2:
            often = max(1, total_steps // 20)
            is_enough = self.settings.num_looks(total_steps / often) > 1
            self.warn(
                "few looks",
                "the weight decay stays as it is: two looks at the probe must agree to move it, but "
                f"total_steps={total_steps} with sync_every={sync_every} leaves {num_looks}. "
                + (f"Pass sync_every={often}" if is_enough else "Train longer, or pass a smaller interval"),
                NoEffectWarning,
            )

    def try_out(self) -> None:
        """Score the first part of the probe."""
        if self._tunable is not None:
            require_scorable(self.replicas)

    def begin(self, num_steps: int) -> None:
        """Begin with the weight decay that the optimizer has now, or with a good one."""
        self._before = num_steps
        self._start = rule.START if self.settings.start == "auto" and self._planned else self._planned
        self._state = rule.DecayState(self._start)
        self._forget_losses()
        if self._tunable is not None and self._start != self._planned and not self._tunable.factors:
            self.move([self._tunable], self._start / self._planned)

    def went_back(self) -> None:
        """Forget what was seen of weights that are gone."""
        self._state = rule.DecayState(self._state.strength)
        self._forget_losses()

    def _forget_losses(self) -> None:
        self._loss_total = 0.0
        self._num_losses = 0.0

    def sync(self, record: RoundRecord) -> None:
        """Look at the probe if it is time."""
        seen = record.counted(record.losses).values()
        self._loss_total += math.fsum(seen)
        self._num_losses += len(seen)
        share_done, before = record.step / self._total_steps, self._before / self._total_steps
        self._before = record.step
        if not self.settings.is_due(share_done, before):
            return
        training_loss = self._loss_total / self._num_losses if self._num_losses else math.nan
        self._forget_losses()
        if self._tunable is None:
            return
        if math.isnan(training_loss):
            self.warn_of_no_loss("the weight decay cannot be moved")
            return
        decayed = self._decayed(self._tunable)
        if not decayed or not rule.may_look(share_done):
            return
        look = self._look(decayed)
        if not all(map(math.isfinite, look)):
            self.warn(
                "held-out loss",
                f"the loss on the probe is not finite at step {record.step}, so the weight decay was not "
                "moved: look for examples in the held-out data whose loss is not finite, and leave them out",
            )
            return
        if min(look.loss, training_loss) < 0:
            self.warn(
                "below zero",
                f"the loss is below zero at step {record.step}, so nobody can tell how far the model "
                "overfits, and the weight decay was not moved",
                remedy="give step() and the probe a loss that is zero at best, or leave the controller out",
            )
        old = self._state.strength
        self._state = rule.moved(
            self._state,
            look,
            training_loss=training_loss,
            share_done=share_done,
            least=rule.least_strength(self._start),
        )
        if self._state.strength != old:
            self.move([self._tunable], self._state.strength / self._planned)
        record.controllers[self.name] = WeightDecayRecord(
            held_out_loss=look.loss,
            gap=self._state.gap,
            slope=look.slope,
            slope_error=math.sqrt(look.variance),
            move=math.log(self._state.strength / old),
        )
        if self.replicas.is_writer:
            _log.info(
                "step %d: held-out loss %.4g, rises by %.3g ± %.2g for each e-fold by which weights shrink; "
                "weight decay %.3g",
                record.step,
                look.loss,
                look.slope,
                math.sqrt(look.variance),
                self._tunable.base,
            )

    def _decayed(self, tunable: Tunable) -> list[Tensor]:
        """List the parameters that decay, and warn where all are frozen."""
        groups = self.values.optimizer.param_groups
        decayed = [p for slot in tunable.slots for p in groups[slot.group_index]["params"] if p.requires_grad]
        if not decayed:
            self.warn(
                "frozen",
                "HeldOutWeightDecay found only parameters with requires_grad=False in the groups that decay: "
                "nothing is moved. Unfreeze some, or leave it out",
                NoEffectWarning,
            )
        return decayed

    def _look(self, decayed: Sequence[Tensor]) -> rule.Look:
        low, high = self.replicas.losses_at(decayed, rule.SCALES)
        return rule.joined_look([rule.Look(*row) for row in self.replicas.gathered(rule.look_of(low, high))])

    @property
    def notes(self) -> list[str]:
        """Tell of a weight decay that has not moved."""
        tunable, count = self._tunable, int(self._state.num_looks)
        if tunable is None or tunable.correction != 1:
            return []
        looks = f"kept in {count} look{'' if count == 1 else 's'}" if count else "no look yet"
        return [f"{tunable.name}: {tunable.base:.3g}, {looks} at held-out data"]

    def state_dict(self) -> dict[str, Any]:
        """Save what it has seen."""
        seen = [*self._state, self._loss_total, self._num_losses, float(self._before)]
        return {"seen": seen, "strengths": [self._planned, self._start]}

    def check_state(self, name: str, state: Any) -> None:
        """See :class:`Steering`."""
        check_keys(name, state, ("seen", "strengths"))
        check_numbers(f"{name} seen", state["seen"], len(rule.DecayState._fields) + 3)
        check_numbers(f"{name} strengths", state["strengths"], 2)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint. The factor is loaded with the weight decay."""
        *known, self._loss_total, self._num_losses, before = state["seen"]
        self._state = rule.DecayState(*known)
        self._before = int(before)
        self._planned, self._start = state["strengths"]

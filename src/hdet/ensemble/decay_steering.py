"""Steering of the weight decay by held-out data, and several controllers at work side by side."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import shown
from hdet.ensemble.state import check_keys, check_numbers
from hdet.ensemble.steering import Steering
from hdet.errors import NoEffectWarning
from hdet.explore import Tunable
from hdet.method.controller import ControllerState
from hdet.method.weight_decay import (
    FEW_EXAMPLES,
    SCALES,
    DecayState,
    Look,
    WeightDecayController,
    joined_look,
    least_strength,
    look_of,
    may_look,
    moved,
)
from hdet.records import RoundRecord
from hdet.replicas.optimizers import decay_per_step, peak_rate
from hdet.replicas.probe import Probe, require_scorable

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


class DecaySteering(Steering):
    """The controller of the weight decay at work: it looks at the probe now and then."""

    controller = "weight_decay"

    def __post_init__(self) -> None:
        told, total_steps = self.settings.controller, self.settings.total_steps
        assert isinstance(told, WeightDecayController)
        if total_steps is None:
            raise ValueError(
                "total_steps must be given to steer the weight decay, got None: it needs the length of a run"
            )
        probe = getattr(self.replicas, "probe", None)
        if not isinstance(probe, Probe):
            raise ValueError(
                f"probe must be an hdet.Probe to explore weight decay, got {shown(probe)}: only held-out "
                "data can tell whether more of it helps, and how surely. Pass probe=hdet.Probe(batches, loss)"
            )
        if self.settings.rule.stays_apart:
            raise ValueError(
                "merge must leave replicas equal to steer the weight decay, got "
                f"{self.settings.rule!r}: leave merge out"
            )
        self._told = told
        self._total_steps = total_steps
        tunables = [t for t in self.values.tunables if t.slots[0].column == "weight_decay"]
        self._tunable = tunables[0] if tunables else None
        self._state = DecayState(0.0)
        if self._tunable is not None:
            decay_strength(self._tunable, self.values.optimizer, total_steps)  # raises where nobody knows it
            self._decayed(self._tunable)
            self._warn_of_few_looks(total_steps, self.settings.sync_every)
            if probe.num_examples < FEW_EXAMPLES:
                self.warn(
                    "few examples",
                    f"the probe has {probe.num_examples} examples: with fewer than {FEW_EXAMPLES} what it "
                    "says is mostly chance. Give more held-out data",
                )

    def _warn_of_few_looks(self, total_steps: int, sync_every: int) -> None:
        num_looks = self._told.num_looks(total_steps / sync_every)
        if num_looks < 2:
            often = max(1, total_steps // 20)
            is_enough = self._told.num_looks(total_steps / often) > 1
            self.warn(
                "few looks",
                "the weight decay stays as it is: two looks at the probe must agree to move it, but "
                f"total_steps={total_steps} with sync_every={sync_every} leaves {num_looks}. "
                + (f"Pass sync_every={often}" if is_enough else "Train longer, or pass a smaller interval"),
                NoEffectWarning,
            )

    def try_out(self) -> None:
        """Score the first part of the probe."""
        probe, model = getattr(self.replicas, "probe", None), getattr(self.replicas, "model", None)
        if isinstance(probe, Probe) and model is not None and self._tunable is not None:
            require_scorable(probe, model)

    def begin(self, num_steps: int) -> None:
        """Begin with the weight decay that the optimizer has now."""
        self._before = num_steps
        if self._tunable is not None:
            self._start = decay_strength(self._tunable, self.values.optimizer, self._total_steps)
            self._state = DecayState(self._start * self._tunable.correction)
        self._forget_losses()

    def weights_went_back(self) -> None:
        """Forget what was seen of weights that are gone."""
        self._state = DecayState(self._state.strength)
        self._forget_losses()

    def _forget_losses(self) -> None:
        self._loss_total = 0.0
        self._num_losses = 0.0

    def sync(self, record: RoundRecord) -> None:
        """Look at the probe if it is time."""
        seen = [loss for r, loss in enumerate(record.losses) if loss is not None and r not in record.excluded]
        self._loss_total += math.fsum(seen)
        self._num_losses += len(seen)
        share_done, before = record.step / self._total_steps, self._before / self._total_steps
        self._before = record.step
        if not self._told.is_due(share_done, before):
            return
        training_loss = self._loss_total / self._num_losses if self._num_losses else math.nan
        self._forget_losses()
        if self._tunable is None:
            return
        if math.isnan(training_loss):
            self.warn(
                "no loss for the weight decay",
                "no loss was given to step(), so the weight decay cannot be moved: call step(loss), or "
                "observe(loss) for each micro-batch",
            )
            return
        decayed = self._decayed(self._tunable)
        if not decayed or not may_look(share_done):
            return
        look = self._look(decayed)
        if not all(map(math.isfinite, look)):
            self.warn(
                "held-out loss",
                f"the loss on the probe is not finite at step {record.step}, so the weight decay was not "
                "moved: look for examples in the held-out data whose loss is not finite, and leave them out",
            )
            return
        old = self._state.strength
        self._state = moved(
            self._state,
            look,
            training_loss=training_loss,
            share_done=share_done,
            least=least_strength(self._start),
        )
        name = self._tunable.name
        if self._state.strength != old:
            self._tunable.correct(ControllerState(math.log(self._state.strength / self._start)))
            self.values.refresh()
        record.held_out_loss = look.loss
        record.gap = self._state.gap
        record.slope[name] = look.slope
        record.slope_error[name] = math.sqrt(look.variance)
        record.signal[name] = math.log(self._state.strength / old)
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
                "WeightDecay found only parameters with requires_grad=False in the groups that decay: "
                "nothing is explored. Unfreeze some, or leave WeightDecay out",
                NoEffectWarning,
            )
        return decayed

    def _look(self, decayed: Sequence[Tensor]) -> Look:
        low, high = self.replicas.losses_at(decayed, SCALES)
        return joined_look([Look(*row) for row in self.replicas.gathered(look_of(low, high))])

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
        return {"controller": self.controller, "seen": seen}

    def check_state(self, state: Any) -> None:
        """See :class:`Steering`."""
        super().check_state(state)
        if state["controller"] == self.controller:
            check_keys("state_dict steering", state, ("seen",))
            check_numbers("state_dict steering seen", state["seen"], len(DecayState._fields) + 3)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint."""
        if state["controller"] == self.controller:
            *known, self._loss_total, self._num_losses, before = state["seen"]
            self._state = DecayState(*known)
            self._before = int(before)


class SeveralSteering(Steering):
    """Several controllers at work, one after the other at every sync.

    Where one of them has put earlier weights back, the others look again at the next sync.
    """

    parts: Sequence[Steering] = ()

    def __post_init__(self) -> None:
        self.controller = "several"

    @property
    def notes(self) -> list[str]:
        """Tell what each has to tell."""
        return [note for part in self.parts for note in part.notes]

    def begin(self, num_steps: int) -> None:
        """Begin, or begin again."""
        for part in self.parts:
            part.begin(num_steps)

    def sync(self, record: RoundRecord) -> None:
        """Let each decide."""
        self.has_gone_back = False
        for part in self.parts:
            if self.has_gone_back:
                part.weights_went_back()
            else:
                part.sync(record)
                self.has_gone_back = part.has_gone_back

    def add_loss(self, loss: Any) -> None:
        """Give it to each."""
        for part in self.parts:
            part.add_loss(loss)

    def step_made(self, num_steps: int, record: RoundRecord | None) -> None:
        """Tell each."""
        for part in self.parts:
            part.step_made(num_steps, record)

    def before_save(self) -> None:
        """Tell each."""
        for part in self.parts:
            part.before_save()

    def state_dict(self) -> dict[str, Any]:
        """Save what each remembers."""
        return {"controller": self.controller, "parts": {p.controller: p.state_dict() for p in self.parts}}

    def check_state(self, state: Any) -> None:
        """Raise if a part cannot load what is there for it. A part that was not there begins anew."""
        check_keys("state_dict steering", state, ("controller",))
        for part, saved in self._saved(state):
            part.check_state(saved)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint."""
        for part, saved in self._saved(state):
            part.load_state_dict(saved)

    def own_state(self, state: Any) -> Any:
        """All of it."""
        return state

    def _saved(self, state: dict[str, Any]) -> list[tuple[Steering, Any]]:
        if state["controller"] in ("none", self.controller):
            return [(part, part.own_state(state)) for part in self.parts]
        return [(part, state) for part in self.parts if part.controller == state["controller"]]

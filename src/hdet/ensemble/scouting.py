"""ScoutPhase: the scout at work, from the first step of an ensemble until it has decided."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from hdet.core.scout import (
    Scout,
    ScoutState,
    advance,
    decide,
    may_move,
    next_fan,
    steps_per_fan,
    trial_shape,
)
from hdet.explore import ExploredValues
from hdet.replicas import Replicas
from hdet.telemetry import ScoutDecision, ScoutRecord

__all__ = ["ScoutPhase"]

_log = logging.getLogger(__name__)


class ScoutPhase:
    """Which fan is running, which step of it, and what each replica's learning rate is.

    Everything is put back when a fan ends. The phase is over once :attr:`decision` is there.

    Args:
        settings: of the scout.
        values: what is explored. All learning rates are scaled together, the rest stays at its base.
        replicas: each is a trial.
        optimizer: tells how learning rates transfer from trials to the run.
        peaks: what a factor of one stands for, for each learning rate and slot.
        total_steps: length of the run, with the scout, if it is known.
        is_corrected: whether the anchored controller follows.
    """

    def __init__(
        self,
        settings: Scout,
        values: ExploredValues,
        replicas: Replicas,
        optimizer: Optimizer,
        *,
        peaks: Sequence[Sequence[float]],
        total_steps: int | None,
        is_corrected: bool,
    ) -> None:
        self._settings, self._values, self._replicas, self._peaks = settings, values, replicas, peaks
        self._total_steps, self._is_corrected = total_steps, is_corrected
        self._is_adaptive = _is_adaptive(optimizer)
        self._lengths = steps_per_fan(settings, replicas.count, total_steps)
        self._state = ScoutState()
        self.decision: ScoutDecision | None = None
        """What the run begins with, once it is decided."""
        self.room_above = math.inf
        """How far a controller may raise the learning rate then."""
        self._save_point = replicas.save_point(on_cpu=settings.copy_on_cpu)
        replicas.keep_gradients_local(True)
        self._begin_fan()

    @property
    def needs_loss(self) -> bool:
        """Whether trials are scored by their training losses."""
        return not self._replicas.has_probe

    def step_made(self, num_steps: int) -> ScoutRecord | None:
        """After an optimizer step of every trial; what was seen if it was the last of a fan.

        Args:
            num_steps: optimizer steps so far.
        """
        self._step += 1
        if self._step < self._num_steps:
            if self._step == round((1 - min(1.0, self._settings.tail)) * self._num_steps):
                self._replicas.clear_losses()  # from here on training losses count
            self._write_trial_values()
            return None
        record = ScoutRecord(
            stage=self._state.stage,
            peak_lr=self._peaks[0][0],
            factors=list(self._factors),
            scores=self._scores(num_steps),
        )
        self._replicas.clear_losses()
        settings, count = self._settings, self._replicas.count
        moves = may_move(self._state, settings, count, self._total_steps, num_steps)
        self._state, leader = advance(self._state, self._factors, record.scores, may_move=moves)
        if leader is not None:
            self._save_point.adopt(leader)
        self._go_back()
        if self._state.stage != "done":
            self._begin_fan()
            return record
        self._decide(num_steps)
        return replace(record, decision=self.decision)

    def abandon(self) -> None:
        """Put everything back as it was before the first trial, and end."""
        self._save_point.restore()
        self.end()

    def end(self) -> None:
        """Share gradients again, and follow the schedule."""
        self._replicas.keep_gradients_local(False)
        for tunable in self._values.learning_rates:
            tunable.held = None

    # --- a fan ---------------------------------------------------------------------------------------

    def _begin_fan(self) -> None:
        """Start the next fan, or the same one again."""
        self._state, self._factors = next_fan(self._state, self._settings, self._replicas.count)
        assert self._state.stage != "done"
        self._step, self._num_steps = 0, self._lengths[self._state.stage]
        self._write_trial_values()

    def _write_trial_values(self) -> None:
        shape = trial_shape(self._step, self._num_steps)
        ones = [1.0] * self._replicas.count
        with self._values.rewriting():
            for tunable, peaks in zip(self._values.learning_rates, self._peaks, strict=True):
                tunable.held = [shape * peak for peak in peaks]
            multipliers = {t.name: self._factors if t.is_scheduled else ones for t in self._values.tunables}
            for tunable in self._values.tunables:
                tunable.multiplier = multipliers[tunable.name][self._replicas.index]
            self._values.use(self._replicas.place(multipliers))

    def _scores(self, num_steps: int) -> list[float | None]:
        """How every trial has done: on the probe, or by its last training losses. Collective."""
        scores = self._replicas.score() if self._replicas.has_probe else None
        reports = self._replicas.report(num_steps, self._values.base, scores)
        by = [report.finite_score if scores is not None else report.losses.mean for report in reports]
        return [score if report.is_finite else None for score, report in zip(by, reports, strict=True)]

    def _go_back(self) -> None:
        """Put everything back; in the second stage, with the weights of the best trial of the first."""
        if self._state.stage == "narrow":
            self._save_point.restore_leader()
        else:
            self._save_point.restore()

    def _decide(self, num_steps: int) -> None:
        state = self._state
        decision = decide(
            state,
            self._settings,
            num_joined=self._replicas.num_joined_batches,
            narrow_steps=self._lengths["narrow"],
            steps_left=None if self._total_steps is None else self._total_steps - num_steps,
            is_adaptive=self._is_adaptive,
            is_corrected=self._is_corrected,
        )
        self.room_above = decision.room_above
        self.decision = ScoutDecision(
            chosen=state.chosen,
            low=state.low,
            high=state.high,
            transfer=decision.transfer,
            factor=decision.factor,
            reason=decision.reason,
        )
        if self._replicas.is_writer:
            peak = self._peaks[0][0]
            _log.info(
                "step %d: the scout has decided: learning rate %.3g, asked for was %.3g%s",
                num_steps,
                peak * decision.factor,
                peak,
                f" ({decision.reason})" if decision.reason else "",
            )

    # --- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Numbers, and tensors on the CPU. A fan that was begun is begun again."""
        return {"trials": self._state.to_json(), "save_point": self._save_point.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint: everything is put back, and the fan begins again."""
        self._state = ScoutState.from_json(state["trials"])
        if len(self._state.grid) % self._replicas.count:  # of another number of replicas
            self._state = replace(self._state, grid=())
        self._save_point.load_state_dict(state["save_point"])
        self._go_back()
        self._begin_fan()


def _is_adaptive(optimizer: Optimizer) -> bool:
    """Whether steps are divided by the gradient's own size, as in Adam."""
    return any(key in optimizer.defaults for key in ("betas", "alpha", "rho", "lr_decay"))

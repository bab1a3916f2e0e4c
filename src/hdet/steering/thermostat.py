"""Steering of the learning rate by what averaging the weights of a round gains, against what time gains."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hdet.checks import check_counts, check_keys, check_numbers
from hdet.errors import NoEffectWarning
from hdet.method import thermostat as rule
from hdet.records import RoundRecord
from hdet.replicas.losses import LossMeter, LossSum
from hdet.replicas.optimizers import peak_rate
from hdet.replicas.probe import require_scorable
from hdet.replicas.saved import check_tensors, check_weights
from hdet.replicas.tail import Tail
from hdet.round_record import ThermostatRecord
from hdet.steering.port import Steering, Surroundings

_log = logging.getLogger(__name__)

_STATE = ("is_on", "num_rounds", "num_recorded", "rounds", "factors", "losses", "lrs", "priors")
"""A state holds at least these."""
_WIDTH = len(rule.Round._fields) + 3
"""Numbers that are saved of a round: what was seen, what averaging and time gained, and the factor."""


class ThermostatSteering(Steering):
    """An :class:`hdet.Thermostat` at work.

    It has rounds of its own, a fortieth of the run each, until the last. The mean of a round's weights is a
    :class:`Tail` of its own, which begins again in every round. Where replicas differ, its rounds end at
    syncs: there all hold their mean, and the means of the rounds are averaged, too.
    """

    name = "thermostat"
    kind = rule.Thermostat
    settings: rule.Thermostat
    watches_steps = True

    def __init__(self, settings: rule.Thermostat, around: Surroundings) -> None:
        super().__init__(replace(settings, priors=settings.priors or rule.GUESS), around)
        total_steps = around.total_steps
        assert total_steps is not None, "needed, and checked"
        self._ends = rule.round_ends(total_steps)[: rule.LAST + 1]
        self._steps = range(1, self._ends[-1] + 1)
        self._slot, self._peak = max(
            (
                (slot, peak_rate(self.values.optimizer.param_groups[slot.group_index]))
                for tunable in self.values.learning_rates
                for slot in tunable.slots
            ),
            key=lambda pair: pair[1],
        )
        self._is_long = total_steps >= rule.LEAST_STEPS * rule.NUM_ROUNDS
        if not self._is_long:
            self.warn(
                "too short for a thermostat",
                f"the thermostat does nothing, because total_steps={total_steps} leaves rounds of fewer than "
                f"{rule.LEAST_STEPS} steps: train for {rule.LEAST_STEPS * rule.NUM_ROUNDS} steps or more, or "
                "leave it out",
                NoEffectWarning,
            )
        self._meter = LossMeter()
        self._mean: Tail | None = None

    def try_out(self) -> None:
        """Score the first part of the probe."""
        if self._is_long:
            require_scorable(self.replicas)

    # --- rounds --------------------------------------------------------------------------------------

    def begin(self, num_steps: int) -> None:
        """Begin a run. What others have trained before is not known, so that it does nothing then."""
        self._state = rule.ThermostatState()
        self._judged: list[tuple[float, float, float]] = []  # of each round, what averaging and time gained
        self._num_recorded = 0
        self._begin_mean(is_on=self._is_long and num_steps == 0)

    def _begin_mean(self, *, is_on: bool) -> None:
        self._mean = None  # give its memory back first
        self._begin_round()
        if is_on:
            self._mean = Tail(self.replicas, self._steps)
            self._mean.begin(is_checked=True)

    def _begin_round(self) -> None:
        self._first = math.nan  # the planned learning rate of its first step
        self._losses = LossSum()
        self._meter.take()
        if self._mean is not None:
            self._mean.forget()

    def add_loss(self, loss: Tensor | float) -> None:
        """Take the loss of a batch."""
        if self._mean is not None:
            self._meter.add(loss.mean() if self.replicas.has_rows and isinstance(loss, Tensor) else loss)

    def step_made(self, num_steps: int, record: RoundRecord | None) -> None:
        """Take the weights, and end a round if it is time."""
        if self._mean is not None:
            self._mean.step_made(num_steps)
            if math.isnan(self._first):
                self._first = self._slot.scheduled
            is_due = num_steps >= self._ends[len(self._state.rounds) + 1]
            if is_due and (record is not None or not self.replicas.differ):
                self._end_round(self._mean, num_steps)
        if record is not None:
            new, self._num_recorded = self._judged[self._num_recorded :], len(self._judged)
            record.controllers[self.name] = ThermostatRecord(
                averaging_gains=[_known(gain) for gain, _, _ in new],
                time_gains=[_known(progress) for _, progress, _ in new],
                factors=[factor for _, _, factor in new],
            )

    def _end_round(self, mean: Tail, num_steps: int) -> None:
        if self.replicas.has_rows:
            self.replicas.weights_written()  # the user's model is what is scored
        end, averaged = self._score(), math.nan
        self._join_means(mean)
        if mean.num_taken:
            with mean.in_place(is_only_scored=True):
                averaged = self._score()
        total, num_losses = self._summed()[:2]
        rows = self.replicas.gathered([end, averaged, total, num_losses])
        end, averaged, total, num_losses = (sum(column) / len(rows) for column in zip(*rows, strict=True))
        if not num_losses:
            self.warn_of_no_loss("the thermostat cannot move the learning rate")
        factor = math.exp(self._state.log_factor)
        seen = rule.Round(
            step=num_steps,
            middle=num_steps - (mean.num_taken - 1) / 2,
            # A warm-up is linear, so that the mean of its ends is that of the round.
            lr=(self._first + self._slot.scheduled) / 2 * factor / self._peak,
            end=end,
            mean=averaged,
            train=total / num_losses if num_losses else math.nan,
        )
        self._state = rule.steered(self._state, seen, self.settings)
        reading, new = self._state.reading, math.exp(self._state.log_factor)
        self._judged.append((reading.gain, reading.progress, new))
        self._begin_round()
        if len(self._state.rounds) == rule.LAST:
            self._mean = None
        if new != factor:
            self.move(self.values.learning_rates, new)
        if self.replicas.is_writer and len(self._state.rounds) >= rule.FIRST:
            _log.info(
                "step %d: averaging gains %.3g ± %.2g, an e-fold of steps %.3g ± %.2g; learning rate x%.3g",
                num_steps,
                *(reading.gain, reading.gain_error, reading.progress, reading.progress_error, new),
            )

    def _join_means(self, mean: Tail) -> None:
        """Let replicas that differ have one mean: that of the steps of all of them. Collective."""
        if self.replicas.differ and (tensors := mean.averaged()):
            self.replicas.average_tensors(tensors, ())

    def _score(self) -> float:
        (losses,) = self.replicas.losses_at((), (1.0,))
        return sum(losses) / len(losses)

    def _summed(self) -> LossSum:
        self._losses = self._losses.plus(self._meter.take())
        return self._losses

    def sync(self, record: RoundRecord) -> None:
        """Begin the mean again where a replica was spoilt: it may have taken bad weights."""
        if record.excluded and self._mean is not None:
            self._mean.forget()

    def went_back(self) -> None:
        """Keep the factor, and leave the rest of the run to the guard."""
        self._begin_mean(is_on=False)

    @property
    def notes(self) -> list[str]:
        """Tell where the learning rate went, and why."""
        count = len(self._state.rounds)
        gain, progress, _ = self._judged[-1] if self._judged else (math.nan, math.nan, 1.0)
        why = "off" if self._mean is None and count < rule.LAST else "no round judged yet"
        if not math.isnan(gain):
            right = self.settings.target * max(0.0, progress)
            why = f"averaging a round's weights gained {gain:.3g} where {right:.3g} is right"
            rounds = self._state.rounds
            num_jumps = sum(rule.has_jumped(rounds[:k]) for k in range(rule.FIRST, count + 1))
            why += f", the training loss jumped in {num_jumps}" if num_jumps else ""
        return [
            f"thermostat: x{math.exp(self._state.log_factor):.3g} after {count} of {rule.LAST} rounds, {why}"
        ]

    # --- checkpoints ---------------------------------------------------------------------------------

    @property
    def is_changed_by_saves(self) -> bool:
        """Tell whether replicas that differ are within a round, whose means a save would join."""
        return self._mean is not None and self._mean.num_taken > 0 and self.replicas.differ

    def before_save(self) -> None:
        """Gather the mean, and share the losses of this round evenly. Collective."""
        if self._mean is not None:
            self._join_means(self._mean)
            self._mean.hold_whole()
            rows = self.replicas.gathered(self._summed())
            self._losses = LossSum(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """Save what it knows."""
        state = self._state
        mean = (self._mean or Tail(self.replicas, self._steps)).state_dict()
        rounds = torch.zeros(rule.LAST, _WIDTH, dtype=torch.float64)  # of one size in every checkpoint
        for row, seen, judged in zip(rounds, state.rounds, self._judged, strict=False):
            row.copy_(torch.tensor([*seen, *judged], dtype=torch.float64))
        return {
            "is_on": int(self._mean is not None),
            "num_rounds": len(state.rounds),
            "num_recorded": self._num_recorded,
            "rounds": rounds,
            "factors": [state.log_factor, state.highest],
            "losses": [*self._summed()],
            "lrs": [self._first, self._peak],
            "priors": [list(prior) for prior in self.settings.priors or ()],
            "mean": mean,
        }

    def check_state(self, name: str, state: Any) -> None:
        """See :class:`Steering`."""
        check_keys(name, state, _STATE)
        check_counts(name, state, ("is_on", "num_rounds", "num_recorded"))
        check_tensors(f"{name} rounds", [state["rounds"]], [torch.empty(rule.LAST, _WIDTH)])
        check_numbers(f"{name} factors", state["factors"], 2)
        check_numbers(f"{name} losses", state["losses"], len(LossSum._fields))
        check_numbers(f"{name} lrs", state["lrs"], 2, is_finite=False)
        for prior in state["priors"]:
            check_numbers(f"{name} priors", prior, 3)
        if (mean := state.get("mean")) is not None:
            check_keys(f"{name} mean", mean, ("mean", "num_taken", "first_step"))
            check_counts(f"{name} mean", mean, ("num_taken", "first_step"))
            check_weights(f"{name} mean", mean["mean"], self.replicas)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint. In a run of another length nothing moves any more."""
        rows = state["rounds"][: state["num_rounds"]].tolist()
        rounds = tuple(rule.Round(int(step), *rest[:5]) for step, *rest in rows)
        late = (rounds[-1].step if rounds else 0) - self._ends[len(rounds)]
        fits = len(rounds) < rule.LAST and 0 <= late < (self.around.sync_every if self.replicas.differ else 1)
        self._begin_mean(is_on=bool(state["is_on"]) and fits and self._is_long)
        log_factor, highest = state["factors"]
        self._state = rule.ThermostatState(log_factor, highest, rounds)
        self._judged = [(gain, progress, factor) for *_, gain, progress, factor in rows]
        self._num_recorded = state["num_recorded"]
        self._losses = LossSum(*state["losses"])
        self._first, self._peak = state["lrs"]
        self.settings = replace(self.settings, priors=tuple((w, m, d) for w, m, d in state["priors"]))
        if self._mean is not None:
            self._mean.load_state_dict(state.get("mean"))


def _known(number: float) -> float | None:
    return number if math.isfinite(number) else None

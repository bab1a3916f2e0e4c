"""Steering by the guard: it goes back where a run loses what it had learnt."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

from hdet.checks import check_counts, check_keys, check_numbers, require_number
from hdet.method.guard import Guard, GuardMemory, watch
from hdet.records import RoundRecord
from hdet.round_record import GuardRecord
from hdet.steering.port import Steering, Surroundings

_log = logging.getLogger(__name__)

_MOST_BRAKES = 8
"""A run that collapses again and again has another fault."""
_SHARE_TO_LEARN = 0.15
"""Of the steps: when a run must have reached the loss that is expected of it."""


class GuardSteering(Steering):
    """A :class:`hdet.Guard` at work."""

    name = "guard"
    kind = Guard
    settings: Guard

    def __init__(self, settings: Guard, around: Surroundings) -> None:
        super().__init__(settings, around)
        assert around.total_steps is not None, "needed, and checked"
        self._total_steps = around.total_steps
        self._forget()

    def _forget(self) -> None:
        self._memory = GuardMemory()
        self._num_brakes = 0
        self._initial: Any = None
        self._initial_is_checked = False

    def begin(self, num_steps: int) -> None:
        """Copy the weights that the run begins with."""
        self._forget()  # give its memory back first
        self._initial = self._save_point()
        self._began_apart = self.replicas.differ
        self._begin_at(num_steps)

    def _save_point(self, spare: Any = None) -> Any:
        return self.replicas.save_point(on_cpu=self.settings.copy_on_cpu, spare=spare)

    def _begin_at(self, step: int) -> None:
        self._copies: list[tuple[Any, GuardMemory]] = []
        self._next_copy = step + self.settings.interval * self._total_steps
        self._learns_until = step + _SHARE_TO_LEARN * self._total_steps

    def sync(self, record: RoundRecord) -> bool:
        """Look at the mean loss of the round."""
        has_gone_back = self._watch(record)
        record.controllers[self.name] = GuardRecord(num_brakes=self._num_brakes)
        return has_gone_back

    def _watch(self, record: RoundRecord) -> bool:
        were_apart = bool(record.excluded) or self._began_apart
        if not self._initial_is_checked and were_apart and not self.replicas.differ:
            # Replicas were not equal since the run began, so parts of the copy do not fit together. Nor may
            # equal replicas go back to weights in which they differ.
            self._initial = None
            self._initial = self._save_point()
        self._initial_is_checked = True
        losses = record.counted(record.losses).values()
        if not record.ends_round:
            return False
        if not losses:
            self.warn_of_no_loss("the guard cannot see whether the run collapses")
            return False
        self._memory = watch(
            self._memory,
            math.fsum(losses) / len(losses),
            self.settings,
            must_have_learnt=record.step >= self._learns_until,
        )
        if self._memory.is_well and record.step >= self._next_copy:
            # Of two, the older one is used: when a collapse shows, the newer may already be spoilt.
            spare = self._copies.pop(0)[0] if len(self._copies) > 1 else None
            self._copies.append((self._save_point(spare), self._memory))
            self._next_copy = record.step + self.settings.interval * self._total_steps
        elif self._memory.num_bad >= self.settings.patience and self._num_brakes < _MOST_BRAKES:
            self._go_back(record)
            return True
        return False

    def _go_back(self, record: RoundRecord) -> None:
        expected = self.settings.expected_loss
        usable = [c for c in self._copies[:1] if expected is None or c[1].lowest <= expected]
        if usable:
            point, self._memory = usable[0]
            self._copies = []  # the next time further back
            self.replicas.restore(point)
            why = "the loss has collapsed, so earlier weights are put back"
        else:
            self.replicas.restore(self._initial)
            self._memory = GuardMemory()
            self._begin_at(record.step)
            why = "the run has lost all that it had learnt, so it begins again"
        self._num_brakes += 1
        self.move(self.values.learning_rates, math.exp(-self._num_brakes * math.log(self.settings.factor)))
        if self.replicas.is_writer:
            _log.warning(
                "step %d: %s, and the learning rate is divided by %g",
                record.step,
                why,
                self.settings.factor,
            )

    def state_dict(self) -> dict[str, Any]:
        """Save what it remembers. The copies are not kept: after a resume the first is the checkpoint's."""
        return {
            "memory": list(self._memory),
            "num_brakes": self._num_brakes,
            "expected_loss": self.settings.expected_loss,
        }

    def check_state(self, name: str, state: Any) -> None:
        """See :class:`Steering`."""
        check_keys(name, state, ("memory", "num_brakes", "expected_loss"))
        check_numbers(f"{name} memory", state["memory"], len(GuardMemory._fields), is_finite=False)
        check_counts(name, state, ("num_brakes",))
        if state["expected_loss"] is not None:
            require_number(f"{name} expected_loss", state["expected_loss"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint."""
        self._memory = GuardMemory(*state["memory"])
        self._num_brakes = state["num_brakes"]
        self.settings = replace(self.settings, expected_loss=state["expected_loss"])

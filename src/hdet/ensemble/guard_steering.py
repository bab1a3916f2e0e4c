"""GuardSteering: go back where a run loses what it had learnt."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

from hdet.checks import require_number
from hdet.ensemble.state import check_counts, check_keys, check_numbers
from hdet.ensemble.steering import Steering
from hdet.errors import HdetWarning, WarnOnce
from hdet.explore import ExploredValues
from hdet.method.controller import ControllerState
from hdet.method.guard import Guard, GuardMemory, watch
from hdet.records import RoundRecord
from hdet.replicas import Replicas

_log = logging.getLogger(__name__)

_MOST_BRAKES = 8
"""A run that collapses again and again has another fault."""
_SHARE_TO_LEARN = 0.15
"""Of the steps: when a run must have reached the loss that is expected of it."""


class GuardSteering(Steering):
    """The guard at work.

    Args:
        settings: of the guard.
        values: the learning rates among them fall after a collapse.
        replicas: whose weights go back.
        total_steps: length of the run.
        warn: tells the user, once.
    """

    def __init__(
        self,
        settings: Guard,
        values: ExploredValues,
        replicas: Replicas,
        *,
        total_steps: int | None,
        warn: WarnOnce,
    ) -> None:
        if total_steps is None:
            raise ValueError(
                "total_steps must be given for a Guard, got None: it needs the length of the run"
            )
        if not values.learning_rates:
            raise ValueError(
                "explore must hold an hdet.LearningRate for a Guard to lower, got none: add "
                "hdet.LearningRate(spread=0)"
            )
        self._settings, self._values, self._replicas = settings, values, replicas
        self._total_steps, self._warn = total_steps, warn
        self._memory, self._num_brakes = GuardMemory(), 0
        self._copies: list[tuple[Any, GuardMemory]] = []
        self._next_copy = 0.0
        self._initial: Any = None
        self._initial_is_checked = self._began_apart = False
        self._learns_until = math.inf

    def begin(self, num_steps: int) -> None:
        """Copy the weights that the run begins with."""
        self._memory, self._num_brakes = GuardMemory(), 0
        self._initial = None  # give its memory back first
        self._initial = self._save_point()
        self._initial_is_checked, self._began_apart = False, self._replicas.differ
        self._begin_at(num_steps)

    def _save_point(self) -> Any:
        return self._replicas.save_point(on_cpu=self._settings.copy_on_cpu)

    def _begin_at(self, step: int) -> None:
        self._copies = []
        self._next_copy = step + self._settings.interval * self._total_steps
        self._learns_until = step + _SHARE_TO_LEARN * self._total_steps

    def sync(self, record: RoundRecord) -> None:
        """Look at the mean loss of the round."""
        record.num_brakes, self.has_gone_back = self._num_brakes, False
        were_apart = bool(record.excluded) or self._began_apart
        if not self._initial_is_checked and were_apart and not self._replicas.differ:
            # Replicas were not equal since the run began, so parts of the copy do not fit together. Nor may
            # equal replicas go back to weights in which they differ.
            self._initial = None
            self._initial = self._save_point()
        self._initial_is_checked = True
        losses = [
            loss for r, loss in enumerate(record.losses) if loss is not None and r not in record.excluded
        ]
        if not record.ends_round:
            return
        if not losses:
            self._warn(
                "no loss",
                "no loss was given to step(), so the guard cannot see whether the run collapses: call "
                "step(loss), or observe(loss) for each micro-batch",
                HdetWarning,
            )
            return
        self._memory = watch(
            self._memory,
            math.fsum(losses) / len(losses),
            self._settings,
            must_have_learnt=record.step >= self._learns_until,
        )
        if self._memory.is_well and record.step >= self._next_copy:
            # Of two, the older one is used: when a collapse shows, the newer may already be spoilt.
            self._copies = self._copies[-1:]  # give memory back before more is taken
            self._copies.append((self._save_point(), self._memory))
            self._next_copy = record.step + self._settings.interval * self._total_steps
        elif self._memory.num_bad >= 2 and self._num_brakes < _MOST_BRAKES:
            self._go_back(record)

    def _go_back(self, record: RoundRecord) -> None:
        expected = self._settings.expected_loss
        usable = [c for c in self._copies[:1] if expected is None or c[1].lowest <= expected]
        if usable:
            (point, self._memory), self._copies = usable[0], []  # the next time further back
            self._replicas.restore(point)
            why = "the loss has collapsed, so earlier weights are put back"
        else:
            self._replicas.restore(self._initial)
            self._memory = GuardMemory()
            self._begin_at(record.step)
            why = "the run has lost all that it had learnt, so it begins again"
        self._num_brakes += 1
        record.num_brakes, self.has_gone_back = self._num_brakes, True
        for tunable in self._values.learning_rates:
            tunable.correct(ControllerState(-self._num_brakes * math.log(self._settings.factor)))
        self._values.refresh()
        if self._replicas.is_writer:
            _log.warning(
                "step %d: %s, and the learning rate is divided by %g",
                record.step,
                why,
                self._settings.factor,
            )

    controller = "guard"

    def state_dict(self) -> dict[str, Any]:
        """What it remembers. The copies are not kept: after a resume the first is the checkpoint's."""
        return {
            "controller": self.controller,
            "memory": list(self._memory),
            "num_brakes": self._num_brakes,
            "expected_loss": self._settings.expected_loss,
        }

    def check_state(self, state: Any) -> None:
        """See :class:`Steering`."""
        super().check_state(state)
        if _is_guards(state):
            check_keys("state_dict steering", state, ("memory", "num_brakes", "expected_loss"))
            check_numbers(
                "state_dict steering memory", state["memory"], len(GuardMemory._fields), is_finite=False
            )
            check_counts("state_dict steering", state, ("num_brakes",))
            if state["expected_loss"] is not None:
                require_number("state_dict steering expected_loss", state["expected_loss"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint."""
        if _is_guards(state):
            self._memory = GuardMemory(*state["memory"])
            self._num_brakes = state["num_brakes"]
            self._settings = replace(self._settings, expected_loss=state["expected_loss"])


def _is_guards(state: Any) -> bool:
    return state["controller"] == GuardSteering.controller

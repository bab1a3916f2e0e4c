"""Steering by the guard: it goes back where a run loses what it had learnt."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from hdet.checks import check_counts, check_keys, check_numbers, require_flag, require_number
from hdet.errors import HdetError
from hdet.method.guard import Guard, GuardMemory, watch
from hdet.records import RoundRecord
from hdet.replicas.copies import WeightsCopy
from hdet.replicas.saved import check_weights
from hdet.round_record import GuardRecord
from hdet.steering.port import Steering, Surroundings

_log = logging.getLogger(__name__)

_MOST_BRAKES = 8
"""A run that collapses again and again has another fault."""
_SHARE_TO_LEARN = 0.15
"""Of the steps: when a run must have reached the loss that is expected of it."""


_STATE = ("memory", "num_brakes", "expected_loss", "steps", "is_checked", "memories", "copies")
"""A state holds at least these."""
_COPIES = ("first", "older", "newer")
"""Names of the copies in it."""


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
        self._held: dict[str, list[Tensor]] | None = None  # for a checkpoint, until the next step
        self._initial: WeightsCopy | None = None
        self._initial_is_checked = False

    def begin(self, num_steps: int) -> None:
        """Copy the weights that the run begins with."""
        self._forget()  # give its memory back first
        self._initial = self._save_point()
        self._began_apart = self.replicas.differ
        self._resumed_at = num_steps
        self._begin_at(num_steps)

    def _save_point(self, spare: WeightsCopy | None = None, saved: Any = None) -> WeightsCopy:
        return self.replicas.save_point(on_cpu=self.settings.copy_on_cpu, spare=spare, saved=saved)

    def _begin_at(self, step: int) -> None:
        self._copies: list[tuple[WeightsCopy, GuardMemory]] = []
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
        elif self._initial is None:
            raise HdetError(
                f"at step {record.step} the loss has collapsed, and the guard has no weights from before the "
                f"resume: go on from a checkpoint before step {self._resumed_at}, with a lower learning rate"
            )
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

    # --- checkpoints ---------------------------------------------------------------------------------

    def _points(self) -> dict[str, tuple[WeightsCopy, GuardMemory]]:
        """Give the copies that a checkpoint holds, by name."""
        if self._initial is None or not self.settings.saves_copies:
            return {}
        return dict(zip(_COPIES, [(self._initial, GuardMemory()), *self._copies], strict=False))

    @property
    def is_in_parts(self) -> bool:
        """Tell whether a checkpoint now could not hold the copies."""
        return self._held is None and not all(point.is_whole for point, _ in self._points().values())

    def before_save(self) -> None:
        """Gather the copies, where each replica holds a part of them. Collective."""
        if self.is_in_parts:
            self._held = {name: point.whole() for name, (point, _) in self._points().items()}

    def after_save(self) -> None:
        """Give the gathered copies back."""
        self._held = None

    def state_dict(self) -> dict[str, Any]:
        """Save what it remembers, and the copies that it would go back to."""
        points = {} if self.is_in_parts else self._points()
        tensors = self._held or {name: point.whole() for name, (point, _) in points.items()}
        copies = {name: self.replicas.as_saved(whole, copies=False) for name, whole in tensors.items()}
        if self.replicas.is_sharded and self.settings.saves_copies:
            here = self.replicas.weights_and_buffers()
            copies = {name: copies.get(name) or self.replicas.as_saved(here) for name in _COPIES}
        return {
            "memory": list(self._memory),
            "num_brakes": self._num_brakes,
            "expected_loss": self.settings.expected_loss,
            "steps": [self._next_copy, self._learns_until],
            "is_checked": self._initial_is_checked,
            "memories": [list(memory) for _, memory in points.values()],
            "copies": copies,
        }

    def check_state(self, name: str, state: Any) -> None:
        """See :class:`Steering`."""
        check_keys(name, state, _STATE)
        for memory in (state["memory"], *state["memories"]):
            check_numbers(f"{name} memory", memory, len(GuardMemory._fields), is_finite=False)
        check_counts(name, state, ("num_brakes",))
        check_numbers(f"{name} steps", state["steps"], 2)
        require_flag(f"{name} is_checked", state["is_checked"])
        check_keys(f"{name} copies", state["copies"], ())
        for copy in state["copies"].values():
            check_weights(f"{name} copies", copy, self.replicas, has_buffers=True)
        if state["expected_loss"] is not None:
            require_number(f"{name} expected_loss", state["expected_loss"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint. Without copies in it there is nothing to go back to until there are new ones."""
        self._memory = GuardMemory(*state["memory"])
        self._num_brakes = state["num_brakes"]
        self.settings = replace(self.settings, expected_loss=state["expected_loss"])
        self._next_copy, self._learns_until = state["steps"]
        self._initial_is_checked = state["is_checked"]
        memories = dict(zip(_COPIES, state["memories"], strict=False))
        if memories and memories.keys() <= state["copies"].keys():
            points = [
                (self._save_point(saved=state["copies"][name]), memory) for name, memory in memories.items()
            ]
            (self._initial, _), *copies = points
            self._copies = [(point, GuardMemory(*memory)) for point, memory in copies]
        elif self._resumed_at:
            self._initial = None

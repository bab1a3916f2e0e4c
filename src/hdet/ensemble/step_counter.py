"""StepCounter: which calls of ``step`` stand for a step that the optimizer has made."""

from __future__ import annotations

__all__ = ["StepCounter"]


class StepCounter:
    """Sees the optimizer step, and tells which calls count.

    Until the first step of the optimizer is seen, every call counts, so that a schedule can be looked at
    without training.
    """

    def __init__(self) -> None:
        self.has_seen_steps = False
        """Whether the optimizer was ever seen to step."""
        self.has_moved = True
        """Whether parameters may have changed since replicas were averaged. At first nobody knows."""
        self._has_stepped = False

    def optimizer_stepped(self) -> None:
        """After every step of the optimizer."""
        self._has_stepped = self.has_seen_steps = self.has_moved = True

    def takes_call(self) -> bool:
        """Whether the optimizer has stepped since the last call."""
        if self._has_stepped:
            self._has_stepped = False
            return True
        return not self.has_seen_steps

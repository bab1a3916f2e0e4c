"""StepCounter: which calls of ``step`` stand for a step that the optimizer has made."""

from __future__ import annotations

from collections.abc import Callable

from hdet.errors import HdetError

__all__ = ["StepCounter"]

_MOST_BEFORE_THE_FIRST_CALL = 4
"""Loading a distributed checkpoint, among others, makes a step or two that change nothing."""


class StepCounter:
    """Sees the optimizer step, and tells which calls count.

    Until the first step of the optimizer is seen, every call without gradients counts, so that a schedule can
    be looked at without training. With gradients it is a step that was skipped: a gradient scaler begins with
    a scale that is too large.

    Args:
        has_gradients: whether any parameter has a gradient.
    """

    def __init__(self, has_gradients: Callable[[], bool]) -> None:
        self._has_gradients = has_gradients
        self.has_seen_steps = False
        """Whether the optimizer was ever seen to step."""
        self.has_moved = True
        """Whether parameters may have changed since replicas were averaged. At first nobody knows."""
        self._num_uncounted, self._is_called = 0, False

    def optimizer_stepped(self) -> None:
        """After every step of the optimizer. Raises if the one before was not counted."""
        self.has_seen_steps = self.has_moved = True
        self._num_uncounted += 1
        if self._num_uncounted > (1 if self._is_called else _MOST_BEFORE_THE_FIRST_CALL):
            raise HdetError(
                f"step() must be called after every optimizer step, but the optimizer has made "
                f"{self._num_uncounted} since the last call: call it in the training loop, not once per "
                'epoch. In Lightning return {"scheduler": ..., "interval": "step"}'
            )

    def takes_call(self) -> bool:
        """Whether the optimizer has stepped since the last call."""
        has_stepped, self._num_uncounted, self._is_called = self._num_uncounted > 0, 0, True
        return has_stepped or not (self.has_seen_steps or self._has_gradients())

"""StepCounter: which calls of ``step`` stand for a step that the optimizer has made."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hdet.errors import HdetError

__all__ = ["StepCounter"]

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
        return has_stepped or not (self.has_seen_steps or self._is_skipped())

    def _is_skipped(self) -> bool:
        before, self._versions = self._versions, _versions(self._parameters)
        return before == self._versions and any(p.grad is not None for p in self._parameters)


def _versions(parameters: Sequence[Tensor]) -> list[int]:
    """Numbers that grow whenever a parameter is written. No device is asked."""
    return [p._version for p in parameters]  # noqa: SLF001

"""StepCounter: which calls of ``step`` stand for a step that the optimizer has made."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hdet.errors import HdetError, warn

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
        self._used: tuple[Tensor, Tensor, int] | None = None  # until the first call that counts
        self._knows_order = False

    def optimizer_stepped(self) -> None:
        """After every step of the optimizer. Raises if the one before was not counted."""
        self.has_seen_steps = self.has_moved = True
        self._num_uncounted += 1
        if not self._knows_order:
            self._used = next(
                ((p, p.grad, _version(p.grad)) for p in self._parameters if p.grad is not None), None
            )
        if self._num_uncounted > (1 if self._is_called else _MOST_BEFORE_THE_FIRST_CALL):
            raise HdetError(
                f"step() must be called after every optimizer step, but the optimizer has made "
                f"{self._num_uncounted} since the last call: call it in the training loop, not once per "
                'epoch. In Lightning return {"scheduler": ..., "interval": "step"}'
            )

    def takes_call(self) -> bool:
        """Whether the optimizer has stepped since the last call."""
        has_stepped, self._num_uncounted, self._is_called = self._num_uncounted > 0, 0, True
        if has_stepped and not self._knows_order:
            self._check_order()
        return has_stepped or not (self.has_seen_steps or self._is_skipped())

    def _check_order(self) -> None:
        """Warn if there are newer gradients than those that the optimizer has used."""
        used, self._used, self._knows_order = self._used, None, True
        if used is None:
            return
        parameter, gradient, version = used
        now = parameter.grad
        # One write may be zero_grad(set_to_none=False). A backward pass after it is another.
        if now is not None and (now is not gradient or _version(now) > version + 1):
            warn(
                "step() must be called after optimizer.step(), but it was called between backward() and "
                "optimizer.step(). So it counts one step too few, and the run does not come to its end: move "
                "the call below optimizer.step()"
            )

    def _is_skipped(self) -> bool:
        before, self._versions = self._versions, _versions(self._parameters)
        return before == self._versions and any(p.grad is not None for p in self._parameters)


def _versions(parameters: Sequence[Tensor]) -> list[int]:
    """Numbers that grow whenever a parameter is written. No device is asked."""
    return [_version(p) for p in parameters]


def _version(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001

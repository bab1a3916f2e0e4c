"""StepCounter: which calls of ``step`` stand for a step that the optimizer has made."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hdet.errors import HdetError
from hdet.replicas.shards import local_part

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
        self.is_called_early = False
        """Whether calls were seen to come between the backward pass and the step of the optimizer."""
        self._may_be_early = False  # until the first call that counts
        self._used: tuple[Tensor, Tensor, int] | None = None

    def optimizer_stepped(self) -> None:
        """After every step of the optimizer. Raises if the one before was not counted."""
        self.has_seen_steps = self.has_moved = True
        self._num_uncounted += 1
        if self._may_be_early:
            self._used = next((_gradient(p) for p in self._parameters if _has_gradient(p)), None)
        if self._num_uncounted > (1 if self._is_called else _MOST_BEFORE_THE_FIRST_CALL):
            raise HdetError(
                f"step() must be called after every optimizer step, but the optimizer has made "
                f"{self._num_uncounted} since the last call: call it in the training loop, not once per "
                'epoch. In Lightning return {"scheduler": ..., "interval": "step"}'
            )

    def takes_call(self) -> bool:
        """Whether the optimizer has stepped since the last call."""
        is_first = not self._is_called
        has_stepped, self._num_uncounted, self._is_called = self._num_uncounted > 0, 0, True
        if has_stepped and self._may_be_early:
            self._judge_order()
        counts = has_stepped or not (self.has_seen_steps or self._is_skipped())
        if is_first:
            self._may_be_early = not counts
        return counts

    def _judge_order(self) -> None:
        """See whether there are newer gradients than those that the optimizer has used.

        The first call did not count: the step was skipped, or is still to come at every call.
        """
        used, self._used, self._may_be_early = self._used, None, False
        if used is None or not _has_gradient(used[0]):
            return
        _, gradient, version = _gradient(used[0])
        is_newer = gradient is not used[1] or version != used[2]
        self.is_called_early = is_newer and bool(local_part(gradient).any())  # else it is zero_grad's

    def _is_skipped(self) -> bool:
        before, self._versions = self._versions, _versions(self._parameters)
        return before == self._versions and any(p.grad is not None for p in self._parameters)


def _versions(parameters: Sequence[Tensor]) -> list[int]:
    """Numbers that grow whenever a parameter is written. No device is asked."""
    return [_version(p) for p in parameters]


def _version(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and not parameter.grad.is_inference()  # these have no version


def _gradient(parameter: Tensor) -> tuple[Tensor, Tensor, int]:
    assert parameter.grad is not None
    return parameter, parameter.grad, _version(parameter.grad)

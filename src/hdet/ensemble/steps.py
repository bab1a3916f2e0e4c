"""Steps: which calls count, and what an ensemble notices between them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import HdetError, WarnOnce
from hdet.replicas.optimizers import partitioning_layer
from hdet.replicas.tensors import AveragedTensors, local_part, parameters_of, real_view

_MOST_BEFORE_THE_FIRST_CALL = 4
"""Loading a distributed checkpoint, among others, makes a step or two that change nothing."""
_LOOKS = (4, 8, 16, 64)
"""Calls in a row without a step after which some parameters are read. It waits for the device."""

NOTICES = {
    "past the end": "step() was called after total_steps={total_steps} steps: the schedule stays at its last "
    "value. Pass the true number of steps as total_steps",
    "after finish": "step() was called after finish(), which ended the run at step {num_steps}: from here on "
    "there is no mean of the last weights",
    "changed outside": "the learning rate, or another value that hdet sets, was changed by something other "
    "than hdet since the last step: remove your own scheduler and what else writes it. "
    "hdet.Ensemble(scheduler=...) takes a schedule of yours, and found.write(optimizer) gives it what was "
    "found",
}
"""A call of ``step`` warns of these, each once."""


class StepCounter:
    """Sees the optimizer step, and tells which calls count.

    Until the first step of the optimizer is seen, calls count, so that a schedule can be looked at without
    training. Not so where there are gradients that have moved nothing: the step was skipped, as by a gradient
    scaler that begins with too large a scale.

    Args:
        parameters: what is trained.
        warn: tells the user, once, that calls come between the backward pass and the step of the optimizer.
    """

    def __init__(self, parameters: Sequence[Tensor], warn: WarnOnce) -> None:
        self._parameters = parameters
        self._warn = warn
        self._versions = _versions(parameters)
        self.has_seen_steps = False
        """Tells if the optimizer was ever seen to step."""
        self.has_moved = True
        """Tells if parameters may have changed since replicas were averaged. At first nobody knows."""
        self._num_uncounted = 0
        self._is_called = False
        self._may_be_early = False  # until the first call that counts
        self._used: tuple[Tensor, Tensor, int] | None = None
        self._num_in_a_row = 0  # calls since the optimizer has stepped
        self._last_sums: list[float] = []

    def optimizer_stepped(self) -> None:
        """Note a step of the optimizer. Raises if the one before was not counted."""
        self.has_seen_steps = True
        self.has_moved = True
        self._num_uncounted += 1
        if self._may_be_early:
            self._used = next(filter(None, map(_gradient, self._parameters)), None)
        if self._num_uncounted > (1 if self._is_called else _MOST_BEFORE_THE_FIRST_CALL):
            made = f"the optimizer has made {self._num_uncounted}"
            since = f"{made} since the last call" if self._is_called else f"it was never called, and {made}"
            raise HdetError(
                f"step(loss) must be called after every optimizer step, but {since}: call it in the training "
                "loop, not once per epoch. In Lightning return "
                '{"scheduler": ..., "interval": "step"}'
            )

    def takes_call(self) -> bool:
        """Tell if the optimizer has stepped since the last call."""
        is_first = not self._is_called
        has_stepped = self._num_uncounted > 0
        self._is_called = True
        self._num_uncounted = 0
        if has_stepped and self._may_be_early:
            self._judge_order()
        if has_stepped:
            self._num_in_a_row = 0
        elif self.has_seen_steps:
            self._num_in_a_row += 1
            if self._num_in_a_row in _LOOKS:
                self._look_for_another_optimizer()
        counts = has_stepped or not (self.has_seen_steps or self._is_skipped())
        if is_first:
            self._may_be_early = not counts
        return counts

    def _look_for_another_optimizer(self) -> None:
        """Tell where parameters move though the optimizer does not step. Fused ones leave no other trace."""
        sample = sorted((p for p in self._parameters if p.requires_grad), key=Tensor.numel)[:4]
        sums = [real_view(local_part(p.detach())).double().sum().nan_to_num().item() for p in sample]
        before, self._last_sums = self._last_sums, sums
        if self._num_in_a_row > _LOOKS[0] and sums != before:
            self._warn(
                "another optimizer",
                f"step() has counted nothing in {self._num_in_a_row} calls: parameters move, but the "
                "optimizer that hdet was given makes no step. It was copied or built anew. Build hdet.AutoLR "
                "with the optimizer that trains, and load the state_dict() of this one",
            )

    def _judge_order(self) -> None:
        """See whether there are newer gradients than those that the optimizer has used.

        The first call did not count: the step was skipped, or is still to come at every call.
        """
        used = self._used
        self._used = None
        self._may_be_early = False
        now = _gradient(used[0]) if used is not None else None
        if used is None or now is None or (now[1] is used[1] and now[2] == used[2]):
            return
        if bool(local_part(now[1]).any()):  # else it is zero_grad's
            self._warn(
                "order",
                "step() must be called after optimizer.step(), but it was called between backward() and "
                "optimizer.step(). So it counts one step too few, and the run does not come to its end: move "
                "the call below optimizer.step()",
            )

    def _is_skipped(self) -> bool:
        before = self._versions
        self._versions = _versions(self._parameters)
        return before == self._versions and any(p.grad is not None for p in self._parameters)


def _versions(parameters: Sequence[Tensor]) -> list[int]:
    """Give numbers that grow whenever a parameter is written. No device is asked."""
    return [p._version for p in parameters]  # noqa: SLF001


def _gradient(parameter: Tensor) -> tuple[Tensor, Tensor, int] | None:
    """Give a parameter with its gradient and that one's version. Tensors of inference mode have none."""
    gradient = parameter.grad
    if gradient is None or gradient.is_inference():
        return None
    return parameter, gradient, gradient._version  # noqa: SLF001


class ParameterWatch:
    """Notices parameters that come or go while an ensemble drives their optimizer: it cannot follow them.

    Args:
        layers: the optimizer, behind its wrappers. Where one keeps a part of its state on each rank, the
            optimizer holds copies of a part of the parameters, which the wrapper may replace.
        model: whose parameters they are; None if it is not known, or shows others while it computes.
    """

    def __init__(self, layers: Sequence[Optimizer], model: nn.Module | None) -> None:
        self._optimizer = layers[-1]
        self._is_partitioned = partitioning_layer(layers) is not None
        self._averaged = AveragedTensors(self._optimizer, model)
        self._last = self._averaged.now()
        self.num_groups = len(self._optimizer.param_groups)
        # They are kept, so that no other gets the same id.
        self._trained, self._of_model = parameters_of(self._optimizer), self._averaged.of_model

    def require_same_groups(self) -> None:
        """Raise where groups were added to the optimizer."""
        if len(self._optimizer.param_groups) != self.num_groups:
            raise HdetError(
                f"the optimizer had {self.num_groups} parameter groups when the ensemble was built, but it "
                f"has {len(self._optimizer.param_groups)} now: build the ensemble after add_param_group()"
            )

    def require_same(self) -> None:
        """Raise where parameters were replaced, removed or added. It looks at each of them."""
        now = self._averaged.now()
        if now is not self._last:
            self._require_known()
            self._last = now

    def _require_known(self) -> None:
        known, now = ({id(p): p for p in each} for each in (self._of_model, self._averaged.of_model))
        num_gone = len(known.keys() - now.keys())
        num_new = sum(now[i].requires_grad for i in now.keys() - known.keys())
        if num_gone or num_new:
            what = "replaced" if num_gone else "added"
            raise HdetError(
                f"{max(num_gone, num_new)} parameters of the model were {what} after the ensemble was built, "
                "so that the optimizer does not train what the model uses: build the optimizer and the "
                "ensemble after changing the model"
            )
        trained = parameters_of(self._optimizer)
        if not self._is_partitioned and list(map(id, trained)) != list(map(id, self._trained)):
            raise HdetError(
                "the optimizer must hold the parameters that it had when the ensemble was built, but they "
                "were changed: build the ensemble after changing them"
            )

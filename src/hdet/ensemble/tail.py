"""Tail: the mean over time of the parameters of a run's last steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hdet.ensemble.state import check_counts, check_keys, check_tensors
from hdet.replicas import Replicas
from hdet.replicas.shards import local_part

__all__ = ["Tail", "TailMean"]

_log = logging.getLogger(__name__)


class TailMean:
    """The mean so far, in float32 where the parameters have fewer bits.

    Its memory is there from the start: a run shall not fail for want of it near its end.

    Args:
        parameters: what is averaged; nothing is taken yet.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.mean = [
            torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32), requires_grad=False)
            for p in parameters
        ]
        self.num_taken = 0
        self.first_step = 0
        """The step that was taken first."""

    @torch.no_grad()
    def take(self, parameters: Sequence[Tensor], step: int) -> None:
        """After a step of the tail: move the mean towards the parameters."""
        self.fit(parameters)
        if self.num_taken == 0:
            self.first_step = step
        self.num_taken += 1
        share = 1 / self.num_taken
        here = [p.detach() for p in parameters]
        if all(p.dtype == mean.dtype for p, mean in zip(here, self.mean, strict=True)):
            torch._foreach_lerp_(self.mean, here, share)  # pyright: ignore[reportPrivateImportUsage]
        else:  # one wide copy at a time
            for p, mean in zip(here, self.mean, strict=True):
                mean.lerp_(p.to(mean.dtype), share)

    @torch.no_grad()
    def put(self, parameters: Sequence[Tensor]) -> None:
        """After the last step: give the parameters the mean."""
        self.fit(parameters)
        for p, mean in zip(parameters, self.mean, strict=True):
            p.copy_(mean)

    def fit(self, parameters: Sequence[Tensor]) -> None:
        """Keep, or repeat, the first row, where replicas that share this process have joined or parted."""
        if any(mean.shape != p.shape for mean, p in zip(self.mean, parameters, strict=True)):
            self.mean = [mean[:1].expand_as(p).clone() for mean, p in zip(self.mean, parameters, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """What is the same on every replica after converging; the mean itself is saved by others."""
        return {"num_taken": self.num_taken, "first_step": self.first_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint, also one of another number of virtual replicas: all have one mean."""
        for mean, whole in zip(self.mean, state["mean"], strict=True):
            saved = local_part(whole)
            mean.copy_(saved if saved.shape == mean.shape else saved[:1].expand_as(mean))
        self.num_taken, self.first_step = state["num_taken"], state["first_step"]


class Tail:
    """The tail of a run: takes the weights of its last steps, and puts their mean in place at the end.

    Args:
        replicas: whose weights they are.
        steps: after which the weights are taken; empty for no tail.
    """

    def __init__(self, replicas: Replicas, steps: range) -> None:
        self._replicas, self._steps = replicas, steps
        self._mean: TailMean | None = None

    def begin(self) -> None:
        """The run begins, or begins again."""
        self._mean = None  # give its memory back first
        if self._steps:
            self._mean = TailMean(self._replicas.weights())

    def step_made(self, num_steps: int) -> None:
        """After an optimizer step: take the weights if it belongs to the tail."""
        if self._mean is not None and num_steps in self._steps:
            self._mean.take(self._replicas.weights(), num_steps)

    def averaged(self) -> list[Tensor]:
        """Tensors that replicas average along with their parameters."""
        if self._mean is None or not self._mean.num_taken:
            return []
        self._mean.fit(self._replicas.weights())
        return self._mean.mean

    def finish(self, num_steps: int) -> int:
        """After the last step and its sync; the number of steps that the weights now are the mean of."""
        mean, self._mean = self._mean, None
        if mean is None or not mean.num_taken:
            return 0
        if not self._replicas.all_finite(mean.mean):  # on every replica alike: they have converged
            _log.warning("step %d: the mean of the tail is not finite, the last weights stay", num_steps)
            return 0
        mean.put(self._replicas.weights())
        self._replicas.weights_written()
        return mean.num_taken

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint keeps; None before the first step of the tail."""
        if self._mean is None or not (self._mean.num_taken or self._replicas.is_sharded):
            return None
        return {"mean": self._replicas.as_saved(self._mean.mean), **self._mean.state_dict()}

    def check_state(self, state: Any) -> None:
        """Raise if :meth:`load_state_dict` could not load this."""
        if state is None:
            return
        check_keys("state_dict tail", state, ("mean", "num_taken", "first_step"))
        check_counts("state_dict tail", state, ("num_taken", "first_step"))
        if self._steps:
            check_tensors("state_dict tail mean", state["mean"], self._replicas.weights(), self._fits)

    def _fits(self, saved: Tensor, weights: Tensor) -> bool:
        """Whether the shapes are equal; of virtual replicas there may be another number of rows."""
        has_rows = hasattr(self._replicas, "num_distinct")
        saved = local_part(saved)
        return saved.shape == weights.shape or (
            has_rows and saved.ndim == 2 and len(saved) > 0 and saved.shape[1] == weights.shape[1]
        )

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load a checkpoint, unless it is of a run that would have ended sooner."""
        if self._mean is not None and state is not None and state["first_step"] >= self._steps[0]:
            self._mean.load_state_dict(state)

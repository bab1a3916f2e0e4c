"""Tail: the mean over time of the parameters of a run's last steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Tail"]


class Tail:
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
        for p, mean in zip(parameters, self.mean, strict=True):
            p.copy_(mean)

    def is_finite(self) -> bool:
        """Whether the mean can be used; waits for the device."""
        return all(bool(torch.isfinite(mean).all()) for mean in self.mean)

    def fit_rows(self, num_rows: int) -> None:
        """For parameters with a row per virtual replica: keep, or repeat, the first ones, which are equal."""
        if len(self.mean[0]) != num_rows:
            self.mean = [mean[:1].expand(num_rows, -1).clone() for mean in self.mean]

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the CPU; the same on every replica after converging."""
        mean = [mean.cpu().clone() for mean in self.mean]
        return {"mean": mean, "num_taken": self.num_taken, "first_step": self.first_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint, also one of another number of virtual replicas: all have one mean."""
        for mean, saved in zip(self.mean, state["mean"], strict=True):
            mean.copy_(saved if saved.shape == mean.shape else saved[:1].expand_as(mean))
        self.num_taken, self.first_step = state["num_taken"], state["first_step"]

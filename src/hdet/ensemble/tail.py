"""Tail: the mean over time of the weights of a run's last steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Tail"]


class Tail:
    """The mean so far, in float32 where the weights have fewer bits.

    Args:
        tensors: what is averaged; nothing is taken yet.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.mean = [
            torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32), requires_grad=False)
            for t in tensors
        ]
        self.num_taken = 0

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> None:
        """After a step of the tail: move the mean towards the weights."""
        self.num_taken += 1
        here = [t.detach().to(mean.dtype) for t, mean in zip(tensors, self.mean, strict=True)]
        if self.num_taken == 1:
            torch._foreach_copy_(self.mean, here)  # pyright: ignore[reportPrivateImportUsage]
        else:
            torch._foreach_lerp_(self.mean, here, 1 / self.num_taken)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def put(self, tensors: Sequence[Tensor]) -> None:
        """After the last step: give the tensors the mean."""
        for tensor, mean in zip(tensors, self.mean, strict=True):
            tensor.copy_(mean)

    def is_finite(self) -> bool:
        """Whether the mean can be used; waits for the device."""
        return all(bool(torch.isfinite(mean).all()) for mean in self.mean)

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the CPU; the same on every replica after converging."""
        return {"mean": [mean.cpu().clone() for mean in self.mean], "num_taken": self.num_taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint, also one of another number of virtual replicas: all have one mean."""
        for mean, saved in zip(self.mean, state["mean"], strict=True):
            mean.copy_(saved if saved.shape == mean.shape else saved[:1].expand_as(mean))
        self.num_taken = state["num_taken"]

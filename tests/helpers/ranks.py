"""What functions do that run on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.models import train_step

__all__ = ["message_of", "of_both", "train"]


def train(
    ensemble: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: Iterable[int],
    spoil: Callable[[int], None] | None = None,
) -> None:
    """Plain steps; ``spoil(step)`` is called before each."""
    for step in steps:
        if spoil is not None:
            spoil(step)
        ensemble.step(train_step(model, optimizer, rank, step))


def of_both(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor of both ranks."""
    both = [torch.zeros_like(tensor) for _ in range(2)]
    dist.all_gather(both, tensor.detach().contiguous())
    return both


def message_of(error: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> str:
    """The message of the error, which the processes hand over as a text."""
    try:
        call()
    except error as raised:
        return str(raised)
    return "nothing was raised"

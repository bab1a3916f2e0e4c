"""An optimizer that stays as it was where building a schedule or an ensemble fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer


@contextmanager
def unchanged_on_error(optimizer: Optimizer) -> Iterator[None]:
    """Put the parameter groups back if the block raises."""
    saved = [
        {
            key: value.clone() if key == "lr" and isinstance(value, Tensor) else value
            for key, value in g.items()
        }
        for g in optimizer.param_groups
    ]
    try:
        yield
    except BaseException:
        for group, before in zip(optimizer.param_groups, saved, strict=True):
            lr = group["lr"]
            group.clear()
            group.update(before)
            if isinstance(lr, Tensor):
                group["lr"] = lr.copy_(before["lr"])
        raise

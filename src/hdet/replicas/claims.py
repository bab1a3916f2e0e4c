"""Claims: an optimizer is driven by one ensemble at a time."""

from __future__ import annotations

from weakref import WeakSet

from torch.optim import Optimizer

__all__ = ["claim", "release", "require_free"]

_claimed: WeakSet[Optimizer] = WeakSet()


def require_free(optimizer: Optimizer) -> None:
    """Raise if an ensemble drives the optimizer."""
    if optimizer in _claimed:
        raise ValueError(
            "optimizer must not be driven by another ensemble, got one that is: both would write its values. "
            "Call close() on the other one first, or build a new optimizer"
        )


def claim(optimizer: Optimizer) -> None:
    """From now on an ensemble drives the optimizer."""
    _claimed.add(optimizer)


def release(optimizer: Optimizer) -> None:
    """The optimizer is free again."""
    _claimed.discard(optimizer)

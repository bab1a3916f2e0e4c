"""What this process knows of an optimizer: who drives it, and what was found for it."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet

from torch.optim import Optimizer

__all__ = ["claim", "release", "remember_search", "require_free", "unused_answer"]

_claimed: WeakSet[Optimizer] = WeakSet()
_searched: WeakKeyDictionary[Optimizer, tuple[list[float], list[float]]] = WeakKeyDictionary()


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


def remember_search(optimizer: Optimizer, asked: Sequence[float], found: Sequence[float]) -> None:
    """A search from these learning rates has found those."""
    _searched[optimizer] = list(asked), list(found)


def unused_answer(optimizer: Optimizer) -> list[float] | None:
    """What a search has found for the optimizer, where it still has the guess; else None."""
    peaks = [float(g.get("max_lr", g.get("initial_lr", g["lr"]))) for g in optimizer.param_groups]
    asked, found = _searched.get(optimizer, (None, None))
    return found if peaks == asked != found else None

"""What is known of an optimizer: who drives it, what is asked of it, and what a search has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch.optim import Optimizer

_claimed: WeakKeyDictionary[Optimizer, ReferenceType[object]] = WeakKeyDictionary()
_searched: WeakKeyDictionary[Optimizer, tuple[list[float], list[float]]] = WeakKeyDictionary()


def require_free(optimizer: Optimizer) -> None:
    """Raise if an ensemble drives the optimizer."""
    driver = _claimed.get(optimizer)
    if driver is not None and driver() is not None:  # one that went out of scope drives nothing
        raise ValueError(
            "optimizer must not be driven by another ensemble, got one that is: both would write its values. "
            "Call close() on the other one first, or build a new optimizer"
        )


def claim(optimizer: Optimizer, driver: object) -> None:
    """From now on ``driver`` drives the optimizer, until it is released or nobody holds it any more."""
    _claimed[optimizer] = ref(driver)


def release(optimizer: Optimizer) -> None:
    """The optimizer is free again."""
    _claimed.pop(optimizer, None)


def peak_rate(group: Mapping[str, Any]) -> float:
    """The learning rate that was asked for in a parameter group: the peak, where a schedule writes there."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def remember_search(optimizer: Optimizer, asked: Sequence[float], found: Sequence[float]) -> None:
    """A search from these learning rates has found those."""
    _searched[optimizer] = list(asked), list(found)


def unused_answer(optimizer: Optimizer) -> list[float] | None:
    """What a search has found for the optimizer, where it still has the guess; else None."""
    peaks = [peak_rate(group) for group in optimizer.param_groups]
    asked, found = _searched.get(optimizer, (None, None))
    return found if peaks == asked != found else None

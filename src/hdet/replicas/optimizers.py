"""Optimizers, schedules and models of the user: what is inside their wrappers, and who drives them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)
from torch.optim.lr_scheduler import LRScheduler

from hdet.checks import require_count, shown
from hdet.errors import bad_argument

_ADAPTIVE = (ASGD, Adadelta, Adagrad, Adam, Adamax, NAdam, RAdam, RMSprop)
"""They add weight decay to the gradient unless a group says otherwise."""
_COPIES_ITS_GROUPS = "ZeroRedundancyOptimizer"
"""Before each step it copies its own groups into the optimizer that it holds: values are written to it."""


def optimizer_layers(optimizer: object) -> list[Optimizer]:
    """The optimizer and what it wraps, from the outside in. The last one makes the steps.

    Accelerate's AcceleratedOptimizer and others hold the real one as ``optimizer`` or ``optim``.
    """
    layers: list[Any] = [optimizer]
    while not is_a(layers[-1], _COPIES_ITS_GROUPS):
        held = [getattr(layers[-1], name, None) for name in ("optimizer", "optim")]
        inner = next((h for h in held if isinstance(h, Optimizer) and h not in layers), None)
        if inner is None:
            break
        layers.append(inner)
    last = layers[-1]
    if not isinstance(last, Optimizer):
        is_model = isinstance(optimizer, nn.Module)
        got = f"a model of type {type(optimizer).__name__}" if is_model else shown(optimizer)
        swapped = ": are model and optimizer swapped?" if is_model else ""
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {got}{swapped}")
    if not hasattr(last, "_optimizer_step_post_hooks"):
        raise TypeError(
            f"optimizer must call torch.optim.Optimizer.__init__, got a {type(last).__name__} that does not: "
            "its steps could not be seen. Call super().__init__ in its constructor, or pass the inner one"
        )
    groups = list(map(id, last.param_groups))
    for name, held in [] if is_a(last, _COPIES_ITS_GROUPS) else vars(last).items():
        if isinstance(held, Optimizer) and list(map(id, held.param_groups)) != groups:
            raise ValueError(
                f"optimizer must share its param_groups with the one that it holds as {name!r}, got "
                f"{type(last).__name__} with groups of its own: what is written there would change nothing. "
                f"Set param_groups = {name}.param_groups in its constructor, or pass the inner one"
            )
    return layers


def partitioning_layer(layers: Sequence[Optimizer]) -> str | None:
    """The class that keeps a part of the optimizer's state on each rank, if one of these is such."""
    kinds = (_COPIES_ITS_GROUPS, "DeepSpeedZeroOptimizer")
    return next((kind for layer in layers for kind in kinds if is_a(layer, kind)), None)


def state_owner(optimizer: Any) -> Optimizer:
    """Find what keeps the moments of this process: the inner one, where the optimizer holds another's."""
    return optimizer.optim if is_a(optimizer, _COPIES_ITS_GROUPS) else optimizer


def refresh_masters(layers: Sequence[Any]) -> None:
    """After the model's weights were written: let ZeRO of DeepSpeed copy them to the parts that it trains."""
    for layer in layers:
        if is_a(layer, "DeepSpeedZeroOptimizer"):
            layer.refresh_fp32_params()


def plain_optimizer(optimizer: object) -> Optimizer:
    """The optimizer that makes the steps. Raises if there is none."""
    return optimizer_layers(optimizer)[-1]


def plain_scheduler(scheduler: Any) -> Any:
    """The schedule itself: accelerate's AcceleratedScheduler holds it as ``scheduler``."""
    while not isinstance(scheduler, LRScheduler) and hasattr(getattr(scheduler, "scheduler", None), "step"):
        scheduler = scheduler.scheduler
    return scheduler


def plain_model(model: Any) -> Any:
    """Return what ``torch.compile`` was given, if the model is what it returned."""
    while is_a(model, "OptimizedModule"):
        model = model._orig_mod  # noqa: SLF001
    return model


def without_ddp(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, also where that was compiled."""
    inner = plain_model(model)
    return inner.module if isinstance(inner, DistributedDataParallel) else model


def is_a(thing: object, class_name: str) -> bool:
    """Tell whether a class of this name is among the thing's own and their bases.

    By name: importing some of these classes takes as long as importing half of torch.
    """
    return any(kind.__name__ == class_name for kind in type(thing).__mro__)


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
    """Let ``driver`` drive the optimizer, until it is released or nobody holds it any more."""
    _claimed[optimizer] = ref(driver)


def release(optimizer: Optimizer) -> None:
    """Let the optimizer be driven by another."""
    _claimed.pop(optimizer, None)


def peak_rate(group: Mapping[str, Any]) -> float:
    """The learning rate that was asked for in a parameter group: the peak, where a schedule writes there."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def group_values(optimizer: Optimizer) -> dict[str, object]:
    """Name what ranks must have in common of an optimizer: its class, and each plain value of its groups."""
    told: dict[str, object] = {"optimizer": type(optimizer).__name__}
    for i, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            plain = value.tolist() if isinstance(value, Tensor) and value.numel() == 1 else value
            if isinstance(plain, (int, float, str, tuple)):
                told[f"{name} of group {i}"] = plain
    return told


def require_resumable(optimizer: Optimizer, last_epoch: int, key: str = "initial_lr") -> None:
    """Raise where a schedule shall go on with an optimizer that none has driven."""
    require_count("last_epoch", last_epoch, at_least=-1)
    if last_epoch >= 0 and any(key not in group for group in optimizer.param_groups):
        must = "must be -1 for an optimizer that no such schedule has driven"
        raise bad_argument("last_epoch", must, str(last_epoch), "leave it out, and load a state_dict")


def remember_search(optimizer: Optimizer, asked: Sequence[float], found: Sequence[float]) -> None:
    """Keep what a search from these learning rates has found."""
    _searched[optimizer] = list(asked), list(found)


def unused_answer(optimizer: Optimizer) -> list[float] | None:
    """Return what a search has found for the optimizer, where it still has the guess; else None."""
    peaks = [peak_rate(group) for group in optimizer.param_groups]
    asked, found = _searched.get(optimizer, (None, None))
    return found if peaks == asked != found else None


def start_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rates that the user gave: the guess, where a search has found others."""
    peaks = [peak_rate(group) for group in optimizer.param_groups]
    asked, found = _searched.get(optimizer, (None, None))
    is_found = found is not None and all(
        math.isclose(a, b, rel_tol=1e-6) for a, b in zip(peaks, found, strict=False)
    )
    return asked if asked is not None and is_found else peaks


@contextmanager
def unchanged_on_error(optimizer: Optimizer) -> Iterator[None]:
    """Put the parameter groups back if the block raises."""
    saved = [
        dict(group, lr=group["lr"].clone()) if isinstance(group.get("lr"), Tensor) else dict(group)
        for group in optimizer.param_groups
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


def decay_per_step(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """Give the share of a weight that a step takes, over learning rate times weight decay.

    It is one where weight decay acts on the weights themselves, as in AdamW. Momentum repeats a decay that is
    added to the gradient. An adaptive optimizer that adds it to the gradient has no such number.
    """
    owners = [
        one for one in getattr(optimizer, "optimizers", ()) if any(g is group for g in one.param_groups)
    ]
    owner = owners[0] if owners else optimizer
    if isinstance(owner, SGD):
        return 1 / (1 - float(group["momentum"]))
    is_decoupled = group.get("decoupled_weight_decay", isinstance(owner, AdamW))
    if isinstance(owner, _ADAPTIVE) and not is_decoupled:
        raise ValueError(
            "optimizer must take weight decay from the weights themselves for it to be explored, got "
            f"{type(owner).__name__}, which adds it to the gradient and then scales both: use AdamW"
        )
    return 1.0

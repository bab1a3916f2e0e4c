"""What a model keeps beside its parameters and buffers, put back as it was: metrics, counters, lists."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_HELD_BY_TORCH = {"_parameters", "_buffers", "_modules"}


@contextmanager
def attributes_put_back(model: nn.Module) -> Iterator[None]:
    """After the block, the plain attributes of all modules are what they were before it.

    Numbers, tensors, and the lists, dicts and sets that are attributes themselves. Metrics of torchmetrics
    are modules that keep their state in these. Other objects stay, with whatever has changed in them.

    >>> model = nn.Linear(2, 1)
    >>> model.losses, model.num_calls = [1.0], 1
    >>> with attributes_put_back(model):
    ...     model.losses.append(2.0)
    ...     model.num_calls, model.is_new = 2, True
    >>> model.losses, model.num_calls, hasattr(model, "is_new")
    ([1.0], 1, False)
    """
    saved = [
        (vars(module), {name: (value, _copy(value)) for name, value in vars(module).items()})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for held, attributes in saved:
            for name in held.keys() - attributes.keys():
                del held[name]
            for name, (value, content) in attributes.items():
                if name not in _HELD_BY_TORCH:
                    _put_back(value, content)
                    held[name] = value


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):  # one of inference mode cannot be changed outside of it
        return None if value.is_inference() else value.detach().clone()
    return value.copy() if isinstance(value, list | dict | set | deque) else None


@torch.no_grad()
def _put_back(value: Any, content: Any) -> None:
    if content is None:
        return
    if isinstance(value, Tensor):
        value.copy_(content)
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(content)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(content)

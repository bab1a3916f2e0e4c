"""SyncBatchNorm where ranks do not make the same steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]


@contextmanager
def own_statistics(model: nn.Module) -> Iterator[None]:
    """Within the block, SyncBatchNorm takes the statistics of this rank's batch alone.

    It would wait for the other ranks in every forward pass, forever where they make another number of them,
    and mix in the activations of models that train with another learning rate.
    """
    changed = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    wrapped = {module: module.__dict__["forward"] for module in changed if "forward" in module.__dict__}
    for module in changed:
        module.forward = functools.partial(_BatchNorm.forward, module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward
        for module, forward in wrapped.items():  # somebody had put it into this module alone
            module.forward = forward

"""twin: the data of a DataLoader, without moving the one that trains."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import DataLoader


def twin(loader: Any) -> Any:
    """Make a loader of the same data with its own order, generator and workers. Other iterables stay.

    >>> import torch
    >>> own = DataLoader(range(8), shuffle=True, generator=torch.Generator().manual_seed(0))
    >>> state = own.generator.get_state()
    >>> len(list(twin(own))), torch.equal(own.generator.get_state(), state)
    (8, True)
    """
    if not isinstance(loader, DataLoader):
        return loader
    other = copy.copy(loader)
    memo = {id(loader.dataset): loader.dataset}  # the data itself is shared
    for name in ("generator", "sampler", "batch_sampler"):
        vars(other)[name] = copy.deepcopy(vars(loader)[name], memo)
    vars(other)["_iterator"] = None  # of workers that stay
    return other

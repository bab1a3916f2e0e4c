"""Where problems find data in installed packages, and in which order they see it."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hdet.errors import HdetError
from hdet.method.fan_out import derived_seed

__all__ = ["package_folder", "shuffled_epochs"]


def package_folder(package: str, command: str) -> Path:
    """The folder of an installed package. The package is not imported.

    Args:
        package: its import name.
        command: what installs it, for the error.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise HdetError(f"the zoo takes data from the package {package!r}, which is missing: run {command}")
    return Path(spec.submodule_search_locations[0])


def shuffled_epochs(
    num_examples: int, batch_size: int, *, seed: int, replica: int, start: int
) -> Iterator[Tensor]:
    """Row numbers of one batch after the other. Every epoch and every replica has its own order.

    >>> batches = shuffled_epochs(4, 2, seed=0, replica=0, start=0)
    >>> sorted(torch.cat([next(batches), next(batches)]).tolist())
    [0, 1, 2, 3]
    """
    per_epoch = num_examples // batch_size
    order, epoch = torch.empty(0), -1
    for step in itertools.count(start):
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            generator = torch.Generator().manual_seed(derived_seed(seed, "epoch", replica, epoch))
            order = torch.randperm(num_examples, generator=generator)
        first = step % per_epoch * batch_size
        yield order[first : first + batch_size]

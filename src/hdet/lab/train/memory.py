"""Whether virtual replicas fit into the memory of a device, by an estimate before anything is built."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from hdet.lab.train.config import RunConfig

_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""What a container may use, where it is limited."""


def memory_of(device: torch.device) -> int | None:
    """Bytes that a device has; None where nobody can tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    try:
        return min(memory, int(_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return memory


def require_memory(config: RunConfig, model: nn.Module, memory: int | None) -> None:
    """Raise if the parameters of all replicas and their moments need more than there is.

    Args:
        config: the settings.
        model: of one replica.
        memory: in bytes; None if it is not known.
    """
    num_moments = 2 if config.optimizer != "sgd" else int(config.momentum > 0)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    needed = config.replicas * size * (1 + num_moments)
    if memory is not None and needed > memory:
        raise ValueError(
            f"replicas must fit into memory, got {config.replicas}: their parameters and the moments of "
            f"{config.optimizer} take about {needed / 1e9:.3g} GB, and there are {memory / 1e9:.3g} GB. Take "
            "fewer replicas, or a smaller model"
        )

"""Probe: score every replica on the same data, without leaving a trace."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hdet.replicas.device import accelerator, accelerator_module
from hdet.replicas.losses import number_of


def run_probe(probe: Callable[[], Tensor | float], model: nn.Module | None) -> float:
    """The loss that ``probe`` returns, with gradients off and the model in evaluation mode.

    Module modes and the states of torch's generators are put back afterwards, also on an error.

    >>> layer = nn.Dropout(0.5)
    >>> run_probe(lambda: layer(torch.ones(4)).sum(), layer)      # dropout is off
    4.0
    >>> layer.training
    True
    """
    modes = [] if model is None else [(module, module.training) for module in model.modules()]
    # fork_rng restores the CPU generator and those of the devices named.
    devices, kind, device = [], "cuda", accelerator()
    if device is not None and device.type != "mps":
        devices, kind = [accelerator_module().current_device()], device.type
    try:
        for module, _ in modes:
            module.training = False
        with torch.random.fork_rng(devices=devices, device_type=kind), torch.no_grad():
            loss = probe()
    finally:
        for module, mode in modes:
            module.training = mode
    return number_of("probe must return", loss)

"""Snapshot: put a model, its optimizer and torch's generators back as they were, to the bit."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.ensemble.tensors import averaged_tensors

__all__ = ["Snapshot"]


class Snapshot:
    """A copy of everything that training changes.

    Args:
        optimizer: its parameters and its moments (none before the first step).
        model: its other parameters, and its buffers.
        on_cpu: keep the copies in host memory.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None, *, on_cpu: bool = False) -> None:
        self._optimizer = optimizer
        self._tensors = averaged_tensors(optimizer, model) + ([] if model is None else list(model.buffers()))
        self._copies = [_copy(tensor, on_cpu) for tensor in self._tensors]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._moments = [copy.deepcopy(optimizer.state.get(p)) for p in parameters]
        self._generators = _generators()

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; the snapshot stays good."""
        for tensor, saved in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(saved)
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._optimizer.state.clear()
        for parameter, moments in zip(parameters, self._moments, strict=True):
            if moments is not None:
                self._optimizer.state[parameter] = copy.deepcopy(moments)
            parameter.grad = None
        torch.random.set_rng_state(self._generators["cpu"])
        if "accelerator" in self._generators:
            _device_module().set_rng_state(self._generators["accelerator"])

    def state_dict(self) -> dict[str, Any]:
        """The copies, on the CPU, for a checkpoint."""
        return {
            "tensors": [_copy(saved, on_cpu=True) for saved in self._copies],
            "moments": copy.deepcopy(self._moments),
            "generators": dict(self._generators),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint's copies."""
        for mine, saved in zip(self._copies, state["tensors"], strict=True):
            mine.copy_(saved)
        self._moments = copy.deepcopy(state["moments"])
        self._generators = dict(state["generators"])


def _copy(tensor: Tensor, on_cpu: bool) -> Tensor:
    return tensor.detach().to("cpu" if on_cpu else tensor.device, copy=True)


def _device_module() -> Any:
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else torch.get_device_module(accelerator)


def _generators() -> dict[str, Tensor]:
    states = {"cpu": torch.random.get_rng_state()}
    module = _device_module()
    if module is not None:
        states["accelerator"] = module.get_rng_state()
    return states

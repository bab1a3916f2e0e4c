"""A save point of one process: a model, its optimizer and torch's generators, put back bit for bit."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas.device import accelerator_module
from hdet.replicas.shards import local_part, reshard
from hdet.replicas.tensors import averaged_tensors

__all__ = ["RankSavePoint", "generator_states", "restore_generators"]


class RankSavePoint:
    """A copy of everything that training changes in this process.

    Args:
        optimizer: its parameters and its moments (none before the first step).
        model: its other parameters, and its buffers.
        on_cpu: keep the copies in host memory.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None, *, on_cpu: bool) -> None:
        self._optimizer = optimizer
        reshard(model)
        tensors = averaged_tensors(optimizer, model) + ([] if model is None else list(model.buffers()))
        self._model, self._tensors = model, [local_part(tensor) for tensor in tensors]
        self._copies = [_copy(tensor, on_cpu) for tensor in self._tensors]
        self._moments = [copy.deepcopy(optimizer.state.get(p)) for p in self._parameters()]
        self._generators = generator_states()

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back. The save point stays good."""
        for tensor, saved in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(saved)
        self._optimizer.state.clear()
        for parameter, moments in zip(self._parameters(), self._moments, strict=True):
            if moments is not None:
                self._optimizer.state[parameter] = copy.deepcopy(moments)
            parameter.grad = None
        reshard(self._model)
        restore_generators(self._generators)


def generator_states() -> dict[str, Tensor]:
    """The states of torch's global generators."""
    states = {"cpu": torch.random.get_rng_state()}
    module = accelerator_module()
    if module is not None:
        states["accelerator"] = module.get_rng_state()
    return states


def restore_generators(states: dict[str, Tensor]) -> None:
    """Put the states of torch's global generators back."""
    torch.random.set_rng_state(states["cpu"])
    module = accelerator_module()
    if module is not None and "accelerator" in states:
        module.set_rng_state(states["accelerator"])


def _copy(tensor: Tensor, on_cpu: bool) -> Tensor:
    return tensor.detach().to("cpu" if on_cpu else tensor.device, copy=True)

"""SavedTraining: a copy of all that a search changes, to put it back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.optim import Optimizer

from hdet.replicas.copies import (
    ALONE,
    WeightsCopy,
    clear_state,
    generator_states,
    put_state,
    restore_generators,
    set_aside_state,
)
from hdet.replicas.exchange import exchange, exchange_within
from hdet.replicas.group import ReplicaGroup
from hdet.replicas.health import Health
from hdet.replicas.tensors import averaged_tensors, local_part, reshard

_log = logging.getLogger(__name__)


class SavedTraining:
    """Keeps weights, buffers, optimizer, gradients, modes and torch's random numbers as they were.

    Args:
        model: the bare model.
        optimizer: the bare optimizer.
        group: all replicas. Those that hold the same weights keep a part of each copy.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, group: ReplicaGroup) -> None:
        reshard(model)
        self._model = model
        self._optimizer = optimizer
        self.parameters = [p for g in optimizer.param_groups for p in g["params"]]
        """The optimizer trains these."""
        self._weights = [local_part(tensor) for tensor in averaged_tensors(optimizer, model)]
        self._buffers = [local_part(tensor) for tensor in model.buffers()]
        self._gradients = [p.grad for p in self.parameters]
        self._fields = [{n: _copy_of(g[n]) for n in g if n != "params"} for g in optimizer.param_groups]
        self._modes = [(module, module.training) for module in model.modules()]
        self._was_training = model.training
        self._equal_group = _equal_group(group, self._weights)
        self._start = self.copy()
        self._generators = generator_states()
        self._moments: dict[Tensor, Any] | None = None  # once there was a first step

    def copy(self) -> WeightsCopy:
        """Copy weights and buffers as they are."""
        return WeightsCopy(self._weights, self._buffers, self._equal_group)

    def begin_at(self, weights: WeightsCopy | None) -> None:
        """Begin with these weights, or those of the model, with a fresh optimizer, in training mode."""
        if self._moments is None:
            self._moments = set_aside_state(self._optimizer)
        if weights is not None:
            weights.put("a trial")
        self.begin_generators()
        clear_state(self._optimizer)
        self._put_fields()
        for parameter in self.parameters:
            parameter.grad = None
        reshard(self._model)
        self.train()

    def train(self) -> None:
        """Set training mode, but for parts of a model in training mode that the user keeps out of it."""
        self._model.train()
        for module, was_training in self._modes:
            if self._was_training and not was_training:
                module.training = False

    def begin_generators(self) -> None:
        """Let torch's random numbers begin where they were."""
        restore_generators(self._generators)

    def begin_buffers(self) -> None:
        """Put the buffers back as they were."""
        self._start.put_buffers()

    def put_back(self, *, after_error: bool = False) -> None:
        """Leave everything as it was.

        Args:
            after_error: another rank may not come here. The weights then stay as they are where this rank has
                but a part of the copy of them.
        """
        if self._moments is None or (after_error and not self._start.is_whole):
            if self._moments is not None:
                _log.error(
                    "the search was ended by an error. Each rank has but a part of the copy of the first "
                    "weights, so the model holds those of a trial: build or load it again before training"
                )
            self._start.put_buffers()
        else:
            self._start.put("the end of the search")
        self.begin_generators()
        if self._moments is not None:
            put_state(self._optimizer, self._moments)
        self._put_fields()
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        for module, mode in self._modes:
            module.training = mode
        reshard(self._model)

    @torch.no_grad()
    def _put_fields(self) -> None:
        """Write what the groups hold beside parameters. Some optimizers count and average there."""
        for group, fields in zip(self._optimizer.param_groups, self._fields, strict=True):
            for name in group.keys() - fields.keys() - {"params"}:
                del group[name]
            for name, value in fields.items():
                if isinstance(value, Tensor) and isinstance(group[name], Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value


def _copy_of(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _equal_group(everyone: ReplicaGroup, weights: Sequence[Tensor]) -> ReplicaGroup:
    """Take all replicas if they hold the same weights, else this one alone. Collective."""
    if not everyone.communicates:
        return ALONE
    sums = exchange(everyone, [float(Health().checksum(weights))])
    are_equal = float(len({row[0] for row in sums}) == 1)
    return everyone if all(row[0] for row in exchange_within(everyone, [are_equal])) else ALONE


@contextmanager
def own_statistics(model: nn.Module) -> Iterator[None]:
    """Let SyncBatchNorm take the statistics of this rank's batch alone, within the block.

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


@contextmanager
def no_copies_of_weights() -> Iterator[None]:
    """Let an autocast around the search keep no copies of weights: they would be those of its first step."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)

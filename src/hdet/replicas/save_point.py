"""A save point of one process: the weights and buffers of its model, put back bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from hdet.replicas.device import accelerator_module
from hdet.replicas.group import ReplicaGroup
from hdet.replicas.shards import local_part, reshard
from hdet.replicas.sliced import SlicedCopy
from hdet.replicas.tensors import parameters_of


class WeightsCopy:
    """A copy of weights, split over replicas that hold the same, and of buffers, whole in every process.

    Buffers are small, and replicas that are equal may have other statistics: each sees its own batches.

    Args:
        weights: local parts where a replica is sharded.
        buffers: the model's.
        group: replicas that hold the same weights, and a part of the copy each.
        device: where the copy lives; None for where the weights do.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        buffers: Sequence[Tensor],
        group: ReplicaGroup,
        *,
        device: str | None = None,
    ) -> None:
        self._weights, self._buffers = weights, buffers
        self._of_weights = SlicedCopy(weights, group, device=device)
        self._of_buffers = SlicedCopy(buffers, device=device)

    @property
    def is_whole(self) -> bool:
        """Whether all of it is in this process."""
        return self._of_weights.is_whole

    def take(self) -> None:
        """Copy them anew, in the same memory. Not collective."""
        self._of_weights.take(self._weights)
        self._of_buffers.take(self._buffers)

    def put(self, what: str) -> None:
        """Put them back. Collective where the copy is split.

        Args:
            what: it belongs to, for the error where a replica does not come.
        """
        self._of_weights.put(self._weights, what)
        self.put_buffers()

    def put_buffers(self) -> None:
        """Put the buffers back. Not collective."""
        self._of_buffers.put(self._buffers)


class RankSavePoint:
    """A copy of what is trained, and of the model's buffers.

    The optimizer's moments are not kept. They are twice the weights with Adam, and are those of a learning
    rate that is about to be lowered: after a restore the optimizer begins again.

    Args:
        optimizer: what keeps the moments of this process.
        model: its buffers.
        group: replicas that hold the same weights, and a part of the copy each.
        weights: what is trained, the same list on every replica; local parts where a replica is sharded.
        written: is called after the weights were put back.
        on_cpu: keep the copies in host memory.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None,
        group: ReplicaGroup,
        *,
        weights: Sequence[Tensor],
        written: Callable[[], None],
        on_cpu: bool,
    ) -> None:
        self._optimizer, self._written = optimizer, written
        reshard(model)
        buffers = [] if model is None else [local_part(buffer) for buffer in model.buffers()]
        self._copy = WeightsCopy(weights, buffers, group, device="cpu" if on_cpu else None)

    def restore(self) -> None:
        """Put weights and buffers back, with an optimizer as before its first step. Collective.

        The save point stays good.
        """
        self._copy.put("going back to a copy")
        clear_state(self._optimizer)
        for parameter in parameters_of(self._optimizer):
            parameter.grad = None
        self._written()


@torch.no_grad()
def clear_state(optimizer: Optimizer) -> None:
    """Let an optimizer forget all steps, as if it were new."""
    if not isinstance(optimizer, Adagrad):
        optimizer.state.clear()
        return
    for group in optimizer.param_groups:  # it makes its state when it is built, and never again
        for parameter in group["params"]:
            optimizer.state[parameter]["sum"].fill_(group["initial_accumulator_value"])
            optimizer.state[parameter]["step"].zero_()


def set_aside_state(optimizer: Optimizer) -> dict[Tensor, Any]:
    """What an optimizer knows, for :func:`put_state`. It goes on with a state of its own."""
    kept = dict(optimizer.state)
    if isinstance(optimizer, Adagrad):
        optimizer.state.update({p: copy.deepcopy(state) for p, state in kept.items()})
    clear_state(optimizer)
    return kept


def put_state(optimizer: Optimizer, kept: dict[Tensor, Any]) -> None:
    """Give back what :func:`set_aside_state` has kept."""
    optimizer.state.clear()
    optimizer.state.update(kept)


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

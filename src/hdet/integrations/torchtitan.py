"""AutoLRContainer: AutoLR in the place of torchtitan's LRSchedulersContainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.auto import AutoLR
from hdet.errors import HdetError
from hdet.records import RecordSink
from hdet.replicas import ReplicaGroup
from hdet.replicas.tensors import is_sharded, parameters_of
from hdet.search.found import FoundLR
from hdet.search.with_torch import find_lr

_REPLICATED, _SAME_DATA = "dp_replicate", "tp"
"""Axes of torchtitan's meshes: of replicas, and of ranks that have the same data."""


class AutoLRContainer:
    """The schedule of a loop in the shape of torchtitan's: ``step``, ``state_dict``, ``get_metrics``.

    It follows torchtitan's conventions. A loss is a share, the sum over the tokens of a micro-batch divided
    by the tokens of all ranks, and gradients are added over ranks. Replicas lie along the axis
    ``dp_replicate`` of the parameters' mesh. As in torchtitan it is Stateful, so that it goes into a
    checkpoint of ``torch.distributed.checkpoint`` as it is. It does not import torchtitan.

    Args:
        optimizers: torchtitan's OptimizersContainer, with one optimizer and one model in ``model_parts``.
        total_steps: length of training in optimizer steps.
        sync_every: steps between looks of the guard; None for a good number.
        records: takes a record of the search and of every round, such as ``hdet.Records("records.jsonl")``.

    .. code-block:: python

        lr_schedulers = AutoLRContainer(optimizers, total_steps=config.training.steps)
        lr_schedulers.find_lr(batches, loss_of)  # not where a checkpoint is loaded
        ...
        loss.backward()
        lr_schedulers.observe(loss)  # of every micro-batch
        ...
        optimizers.step()
        lr_schedulers.step()
    """

    def __init__(
        self,
        optimizers: Any,
        *,
        total_steps: int,
        sync_every: int | None = None,
        records: RecordSink | None = None,
    ) -> None:
        self._model: nn.Module = _only("model part", optimizers.model_parts)
        self._optimizer: Optimizer = _only("optimizer", list(optimizers))
        self._replicas, self._num_shares = _layout(parameters_of(self._optimizer))
        self._settings = {"total_steps": total_steps, "sync_every": sync_every, "records": records}
        self.found: FoundLR | None = None
        """Holds what the search has found. None before it, and where a checkpoint was loaded."""
        self._loss: Tensor | None = None

    @cached_property
    def auto(self) -> AutoLR:
        """Drives the optimizer, from the first use on."""
        of_run: dict[str, Any] = {"model": self._model, "found": self.found, "replicas": self._replicas}
        return AutoLR(self._optimizer, **of_run, **self._settings)

    def find_lr(
        self,
        batches: Iterable[Any],
        loss: Callable[[nn.Module, Any], Tensor],
        *,
        clip_norm: float | None = None,
    ) -> FoundLR:
        """Find the learning rate by :func:`hdet.find_lr`, before the first step. Every rank must call it.

        Args:
            batches: training batches of this rank. A loader that keeps its place gives some of its data away.
            loss: ``loss(model, batch)``, the mean over the batch.
            clip_norm: gradients are clipped to this norm, ``config.training.max_norm``.
        """
        if "auto" in vars(self):
            raise HdetError(
                f"find_lr must be called before the first step, but {self.auto.num_steps} are counted and "
                "the schedule is in use: search right after the container is built"
            )

        def with_shared_gradient(model: nn.Module, batch: Any) -> Tensor:
            value = loss(model, batch)
            share = value / self._num_shares
            return share + (value - share).detach()  # the mean, with the gradient of a share

        self.found = find_lr(
            self._model,
            self._optimizer,
            batches,
            with_shared_gradient,
            total_steps=self._settings["total_steps"],
            clip_norm=clip_norm,
            replicas=self._replicas,  # pyright: ignore[reportArgumentType]
        )
        _ = self.auto
        return self.found

    def observe(self, loss: Tensor) -> None:
        """Take the loss of one micro-batch, as ``forward_backward_step`` returns it."""
        _ = self.auto  # before the first step, so that it has the first learning rate of the schedule
        share = loss.detach().reshape(())
        self._loss = share.clone() if self._loss is None else self._loss + share

    def step(self) -> None:
        """Count an optimizer step. Call it right after ``optimizers.step()``."""
        loss, self._loss = self._loss, None
        if loss is None:
            raise HdetError(
                "observe(loss) must be called for every micro-batch before step(), but it was not: the guard "
                "cannot see whether the run collapses. Call it in forward_backward_step"
            )
        self.auto.step(loss * self._num_shares)

    def get_metrics(self) -> dict[str, float]:
        """Learning rates under torchtitan's names."""
        _ = self.auto
        name, rates = type(self._optimizer).__name__, [float(g["lr"]) for g in self._optimizer.param_groups]
        if len(rates) == 1:
            return {f"lr/{name}": rates[0]}
        return {f"lr/{name}/{i}": rate for i, rate in enumerate(rates)}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps. Every rank comes here when one is saved or about to be loaded."""
        self.auto.converge()
        return self.auto.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where it was saved."""
        self.auto.load_state_dict(state_dict)


def _only(name: str, things: Sequence[Any]) -> Any:
    if len(things) != 1:
        raise HdetError(
            f"optimizers must hold one {name}, got {len(things)}: pipeline parallelism and several kinds of "
            "optimizer are not supported. Use one optimizer, and data or tensor parallelism"
        )
    return things[0]


def _layout(parameters: Sequence[Any]) -> tuple[ReplicaGroup, int]:
    """Replicas along ``dp_replicate`` of the largest mesh, and the number of ranks that share a loss."""
    meshes = [p.device_mesh for p in parameters if is_sharded(p)]
    if not meshes:
        group = ReplicaGroup.of(None)
        return group, group.count
    mesh = max(meshes, key=lambda mesh: mesh.ndim)
    names = mesh.mesh_dim_names or [str(axis) for axis in range(mesh.ndim)]
    if mesh.size() != dist.get_world_size():
        raise HdetError(
            f"the mesh of the parameters must span all ranks, got {mesh.size()} of {dist.get_world_size()}: "
            "pipeline parallelism is not supported"
        )
    groups = {name: mesh.get_group(axis) for axis, name in enumerate(names)}
    num_shares = prod(mesh.size(axis) for axis, name in enumerate(names) if name != _SAME_DATA)
    within = tuple(group for name, group in groups.items() if name != _REPLICATED)
    if _REPLICATED not in names:
        return ReplicaGroup(0, 1, None, within), num_shares
    joined = groups[_REPLICATED]
    return ReplicaGroup(dist.get_rank(joined), dist.get_world_size(joined), joined, within), num_shares

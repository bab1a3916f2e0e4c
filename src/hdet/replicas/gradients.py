"""Gradients: kept in their replica, or averaged without those that are not finite."""

# No postponed annotations here: DistributedDataParallel reads those of the hook, and refuses strings.

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet.errors import ReplicasDifferError
from hdet.replicas.exchange import exchange, exchange_within
from hdet.replicas.group import ReplicaGroup, meshes_of
from hdet.replicas.tensors import local_part, parameters_of, real_view


class GradientExchange:
    """The exchange of gradients that DistributedDataParallel makes in every backward pass.

    Args:
        model: what is trained. Without DistributedDataParallel in it there is no exchange to stop.
    """

    def __init__(self, model: nn.Module | None) -> None:
        modules = [] if model is None else model.modules()
        self.wrapped: list[Any] = [m for m in modules if isinstance(m, DistributedDataParallel)]
        """The modules that make it; empty where there is none."""
        self._before: list[bool] | None = None

    def stop(self) -> None:
        """Keep gradients in their replica, until :meth:`resume`. A second call sees that it stays so."""
        if self._before is None:
            self._before = [wrapped.require_backward_grad_sync for wrapped in self.wrapped]
        for wrapped in self.wrapped:
            wrapped.require_backward_grad_sync = False

    def resume(self) -> None:
        """Put everything back as it was before :meth:`stop`."""
        for wrapped, before in zip(self.wrapped, self._before or (), strict=False):
            wrapped.require_backward_grad_sync = before
        self._before = None


def require_local_gradients(
    group: ReplicaGroup, parameters: Sequence[Tensor], model: nn.Module | None
) -> None:
    """Raise if the model cannot keep gradients in its replica, as fully_shard on an HSDP mesh cannot.

    Args:
        group: who takes part.
        parameters: what is trained.
        model: what holds them, if it is known.
    """
    if any(module.static_graph for module in GradientExchange(model).wrapped):
        raise ValueError(
            "gradients must be 'shared' for DistributedDataParallel with static_graph=True, got 'local': it "
            "fails in a backward pass that does not average. Wrap the model without static_graph"
        )
    mesh = mesh_of_replicas(group, parameters)
    if mesh is not None:
        raise ValueError(
            "gradients must be 'shared' for a model that averages them itself, got 'local' with "
            f"parameters on {mesh}, which has the axis of the replicas: shard the model within a "
            'replica only, fully_shard(module, mesh=mesh["shard"]), and keep '
            'replicas=mesh["replicate"]'
        )


def mesh_of_replicas(group: ReplicaGroup, parameters: Sequence[Tensor]) -> Any | None:
    """The mesh of a model that is sharded over the replicas too, and averages gradients itself (HSDP)."""
    if group.process_group is None or group.count == 1:
        return None
    replicas = dist.get_process_group_ranks(group.process_group)
    for mesh in meshes_of(parameters):
        if any(dist.get_process_group_ranks(mesh.get_group(i)) == replicas for i in range(mesh.ndim)):
            return mesh
    return None


_TENSORS, _ELEMENTS, _DIRECTIONS = 64, 1024, 8
"""Of gradients that are compared: how many, how much of each, and along how many random directions."""
_APART = 0.1
"""Distance between the directions of two gradients, over which they are not the same one."""


class SharedGradients:
    """Sees that replicas that differ train with one gradient, at the first sync that finds any.

    Their weights tell nothing then. Gradients are compared by their directions: an optimizer may have scaled
    them in place by a replica's own values.

    Args:
        group: who takes part.
        optimizer: of what is trained.
    """

    def __init__(self, group: ReplicaGroup, optimizer: Optimizer) -> None:
        self._group = group
        self._optimizer = optimizer
        self.is_seen = not group.communicates

    @torch.no_grad()
    def require(self, num_steps: int) -> None:
        """Raise on all replicas alike if they do not share their gradients. Collective until it is known."""
        rows = exchange(self._group, self._directions())
        mean = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
        apart = max(math.dist(row, mean) for row in rows) / math.sqrt(_DIRECTIONS)
        known = float(all(any(row) for row in rows))
        everywhere = exchange_within(self._group, [known, apart])
        self.is_seen = all(row[0] for row in everywhere)
        apart = max(row[1] for row in everywhere)
        if self.is_seen and apart > _APART:
            raise ReplicasDifferError(
                f"at step {num_steps} replicas must share their gradients, but they differ by {apart:.2g} of "
                "their size: wrap the model in DistributedDataParallel and compute the loss with it, or pass "
                "gradients='local', with which each replica keeps its own"
            )

    def _directions(self) -> list[float]:
        """The gradient along a few random directions, over its size; zeros where there is none."""
        gradients = [p.grad for p in parameters_of(self._optimizer) if p.grad is not None][:_TENSORS]
        parts = [real_view(local_part(g)).reshape(-1)[:_ELEMENTS].double().cpu() for g in gradients]
        flat = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
        size = flat.norm().item()
        if not 0 < size < math.inf:
            return [0.0] * _DIRECTIONS
        generator = torch.Generator().manual_seed(0)
        signs = 2 * torch.randint(2, (_DIRECTIONS, len(flat)), generator=generator) - 1
        return (signs.double() @ flat / size).tolist()


def finite_mean_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """Mean of the replicas' gradients, leaving out those that are not finite.

    DDP's own mean spreads one replica's NaN to all of them, and with it the whole run. With this hook a
    replica whose gradient bucket holds a NaN or an infinity contributes nothing to that bucket and
    receives the mean of the others. If no replica has a finite bucket the result is NaN, as without
    the hook, so that a gradient scaler or a check of yours still sees it. No host sync; one extra
    one-element reduction per bucket::

        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, hdet.finite_mean_hook)      # None: the default process group
    """
    group = process_group if process_group is not None else dist.group.WORLD
    gradient = bucket.buffer()
    values = gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001
    is_finite = torch.isfinite(values).all()
    # A product would keep NaN (0 * NaN is NaN): select instead.
    values.copy_(torch.where(is_finite, values, torch.zeros_like(values)))
    size = dist.get_world_size(group)
    gradient.div_(size)  # before the sum, so that half precisions do not overflow
    num_finite = is_finite.to(torch.float32).reshape(1)
    count_work = dist.all_reduce(num_finite, group=group, async_op=True)
    work = dist.all_reduce(gradient, group=group, async_op=True)
    assert count_work is not None and work is not None

    def divide(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        count_work.wait()
        return future.value()[0].mul_(size / num_finite)

    return work.get_future().then(divide)

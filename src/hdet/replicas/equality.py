"""What to do where replicas differ that ought to be equal."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hdet.errors import HdetWarning, ReplicasDifferError
from hdet.replicas.group import ReplicaGroup

__all__ = ["require_equal"]

_ROUNDING = 1e-4
"""Differences up to this share of a tensor's largest element may come from different hardware."""
_MOST_NAMES = 3


@torch.no_grad()
def require_equal(
    group: ReplicaGroup, tensors: Sequence[Tensor], names: Sequence[str], num_steps: int
) -> bool:
    """Raise if replicas differ by more than rounding; else warn and tell that they shall be averaged.

    Collective. It is called only where checksums differ, so it takes its time: a collective for each tensor.
    """
    apart = []
    for tensor in tensors:
        wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
        mean = wide.clone()
        dist.all_reduce(mean, group=group.process_group)
        mean /= group.count
        size = mean.abs().max() if mean.numel() else torch.zeros(())
        apart.append(((wide - mean).abs().max() / size).item() if size > 0 else 0.0)
    largest = torch.tensor(apart, device=group.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group.process_group)
    found = sorted(zip(largest.tolist(), names, strict=True), reverse=True)
    shown = ", ".join(
        f"{name} by {share:.2g} of its size" for share, name in found[:_MOST_NAMES] if share > 0
    )
    if found and found[0][0] > _ROUNDING:
        raise ReplicasDifferError(
            f"at step {num_steps} all replicas must hold the same parameters, because nothing is explored, "
            f"but they differ: {shown}. Wrap the model in DistributedDataParallel, give hdet the optimizer "
            "of all trained parameters, load the same checkpoint on every rank, and perturb a start with the "
            "ensemble's own warm_start()"
        )
    if group.index == 0:
        warnings.warn(
            f"at step {num_steps} replicas that ought to be equal differ by rounding ({shown}): they are "
            "averaged. Ranks on different hardware do this",
            HdetWarning,
            stacklevel=6,
        )
    return True

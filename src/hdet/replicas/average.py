"""The mean over replicas of many tensors, in place, in flat buckets (paper, eq. 3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hdet.replicas.group import Replicas

__all__ = ["all_finite", "average_"]

# Many small copies in one call; torch's own optimizers rest on it.
_copy_all_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether every element of every tensor is finite. Reads the tensors once; waits for the device."""
    tensors = [_as_real(t) for t in tensors if t.numel()]
    if not tensors:
        return True
    # The largest magnitude is infinite or NaN exactly when some element is, and cannot overflow itself.
    largest = torch.nn.utils.get_total_norm(tensors, norm_type=float("inf"))
    return bool(torch.isfinite(largest))


@torch.no_grad()
def average_(
    tensors: Sequence[Tensor],
    replicas: Replicas,
    *,
    contribute: bool = True,
    num_contributors: int | None = None,
    bucket_mib: float = 25.0,
) -> None:
    """Replace each tensor by its mean over the replicas that contribute.

    Every replica receives the mean, also one that does not contribute (because its parameters are not
    finite). The extra memory is one bucket. Half precisions are summed in float32.

    Args:
        tensors: the same list, in the same order, on every replica.
        replicas: who takes part.
        contribute: whether this replica's tensors enter the mean.
        num_contributors: how many replicas contribute; all of them if None.
        bucket_mib: size of the buffer that tensors are packed into.
    """
    if not replicas.communicates:
        return
    divisor = replicas.count if num_contributors is None else num_contributors
    bucket_bytes = int(bucket_mib * 2**20)
    for (device, dtype), members in _by_kind(tensors).items():
        capacity = max(1, bucket_bytes // dtype.itemsize)
        packed: list[Tensor] = []
        for tensor in members:
            # A tensor that fills half a bucket is worth a collective of its own: no copy, no memory.
            if tensor.dtype == dtype and tensor.is_contiguous() and 2 * tensor.numel() >= capacity:
                _reduce(tensor, replicas, contribute, divisor)
            else:
                packed.append(tensor)
        total = sum(t.numel() for t in packed)
        if total == 0:
            continue
        bucket = torch.empty(min(capacity, total), dtype=dtype, device=device)
        for pieces in _fill(_pieces(packed, capacity), capacity):
            used, views = 0, []
            for piece in pieces:
                views.append(bucket[used : used + piece.numel()].view(piece.shape))
                used += piece.numel()
            if contribute:
                _copy_all_(views, pieces)
            _reduce(bucket[:used], replicas, contribute, divisor)
            _copy_all_(pieces, views)


def _reduce(tensor: Tensor, replicas: Replicas, contribute: bool, divisor: int) -> None:
    if not contribute:
        tensor.zero_()
    dist.all_reduce(tensor, group=replicas.process_group)
    # Dividing afterwards keeps the mean of equal values exact for powers of two.
    tensor.div_(divisor)


def _by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        tensor = _as_real(tensor.detach())
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        kinds.setdefault((tensor.device, dtype), []).append(tensor)
    return kinds


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _pieces(tensors: Iterable[Tensor], capacity: int) -> Iterator[Tensor]:
    """The tensors, those larger than a bucket cut into parts that fit."""
    for tensor in tensors:
        if tensor.numel() <= capacity:
            if tensor.numel():
                yield tensor
        elif tensor.is_contiguous():
            yield from tensor.view(-1).split(capacity)
        else:
            for row in tensor.unbind(0):
                yield from _pieces([row], capacity)


def _fill(pieces: Iterable[Tensor], capacity: int) -> Iterator[list[Tensor]]:
    """Runs of pieces that fit a bucket together."""
    run: list[Tensor] = []
    used = 0
    for piece in pieces:
        if run and used + piece.numel() > capacity:
            yield run
            run, used = [], 0
        run.append(piece)
        used += piece.numel()
    if run:
        yield run

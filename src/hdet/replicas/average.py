"""The mean over replicas of many tensors, in place, in flat buckets (paper, eq. 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hdet.replicas.group import ReplicaGroup
from hdet.replicas.tensors import KnownTensors, flat_view, real_view

# Many small copies in one call; torch's own optimizers rest on it.
_copy_all_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class Averager:
    """Averages a list of tensors over replicas, again and again.

    Large tensors are reduced where they are. Small ones are packed into a bucket, which is used in two
    halves: one is filled while the other is on its way. Half precisions are summed in float32. How to pack is
    worked out once and kept while the tensors stay where they are.

    Args:
        group: who takes part.
        bucket_mib: size of the bucket, and so the extra memory.
    """

    def __init__(self, group: ReplicaGroup, *, bucket_mib: float = 25.0) -> None:
        self._group = group
        self.communicates = group.communicates
        self._half_bucket_bytes = int(bucket_mib * 2**20) // 2
        self._packing: list[_Kind] = []
        self._known = KnownTensors()

    @torch.no_grad()
    def average_(
        self, tensors: Sequence[Tensor], contribute: float = True, num_contributors: int | None = None
    ) -> None:
        """Replace each tensor by its mean over the replicas that contribute. Collective.

        For a weighted mean each replica contributes its weight, and ``num_contributors`` is 1.

        Every replica receives the mean, also one that does not contribute (because its parameters are
        not finite).

        Args:
            tensors: the same list, in the same order and memory layout, on every replica.
            contribute: whether this replica's tensors enter the sum, or how much of them.
            num_contributors: how many replicas contribute; all of them if None.
        """
        if not self._group.communicates:
            return
        divisor = self._group.count if num_contributors is None else num_contributors
        for kind in self._kinds(tensors):
            kind.average_(self._group, contribute, divisor)

    def _kinds(self, tensors: Sequence[Tensor]) -> list[_Kind]:
        if not self._known.are(tensors):
            members: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for tensor in map(real_view, filter(Tensor.numel, tensors)):
                dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
                members.setdefault((tensor.device, dtype), []).append(tensor)
            self._packing = [
                _Kind(device, dtype, group, self._half_bucket_bytes)
                for (device, dtype), group in members.items()
            ]
            self._known.remember(tensors)
        return self._packing


class _Kind:
    """All tensors of one device whose sums have one precision, as jobs of at most half a bucket."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, tensors: Sequence[Tensor], half_bucket_bytes: int
    ) -> None:
        capacity = max(1, half_bucket_bytes // dtype.itemsize)
        self._scattered: list[tuple[Tensor, Tensor]] = []
        in_place: list[Tensor] = []
        packed: list[Tensor] = []
        for tensor in tensors:
            flat = flat_view(tensor)
            if flat is None:
                flat = tensor.contiguous().view(-1)  # a copy, filled again before each use
                self._scattered.append((tensor, flat))
            # What fills a quarter of a bucket is worth a collective of its own: no copy, no memory.
            is_large = flat.dtype == dtype and 2 * flat.numel() >= capacity
            (in_place if is_large else packed).append(flat)
        # Small pieces side by side, so that they can be handled in one go.
        packed.sort(key=Tensor.numel)
        runs = list(_fill(packed, capacity))
        # Kept between calls: on the CPU, fresh memory costs more than the copies that go through it.
        sizes = [sum(map(Tensor.numel, run)) for run in runs]
        bucket = [torch.empty(max(sizes), dtype=dtype, device=device) for _ in runs[:2]]
        self._jobs = [_Job(piece) for flat in in_place for piece in flat.split(capacity)]
        self._jobs += [_Job(bucket[i % 2][: sizes[i]], run) for i, run in enumerate(runs)]

    def average_(self, group: ReplicaGroup, contribute: float, divisor: int) -> None:
        for tensor, flat in self._scattered:
            flat.copy_(tensor.reshape(-1))
        # Two jobs are on the way at a time: while one travels, the other is packed or unpacked. Jobs two
        # apart share a half of the bucket, so the older one is finished before the newer one is packed.
        on_the_way: list[tuple[_Job, dist.Work]] = []
        for job in self._jobs:
            if len(on_the_way) == 2:
                _finish(*on_the_way.pop(0), divisor)
            buffer = job.pack(contribute)
            group.traffic.num_bytes += buffer.nbytes
            work = dist.all_reduce(buffer, group=group.process_group, async_op=True)
            assert work is not None
            on_the_way.append((job, work))
        for job, work in on_the_way:
            _finish(job, work, divisor)
        for tensor, flat in self._scattered:
            tensor.copy_(flat.view(tensor.shape))


class _Job:
    """A buffer that is reduced: a large piece where it is, or a part of the bucket with pieces side by side.

    Args:
        buffer: what travels.
        pieces: what is copied into it and back, sorted by size; none for a piece that is its own buffer.
    """

    small = 2**14
    """Below this many elements the cost of a piece is that of the call, not that of its memory."""

    def __init__(self, buffer: Tensor, pieces: list[Tensor] | tuple[()] = ()) -> None:
        self._buffer = buffer
        self._pieces = pieces
        num_small = sum(piece.numel() < self.small for piece in pieces)
        views = buffer.split([piece.numel() for piece in pieces]) if pieces else ()
        self._small = pieces[:num_small]
        self._small_views = views[:num_small]
        # What is divided in the buffer: large pieces are divided on their way out of it.
        self._divided = buffer[: sum(map(Tensor.numel, self._small))] if pieces else buffer
        self._large = list(zip(pieces[num_small:], views[num_small:], strict=True))
        # On the CPU a small copy is three times faster in numpy than in torch.
        self._arrays = None
        if all(piece.device.type == "cpu" and piece.dtype == buffer.dtype for piece in self._small):
            pairs = zip(self._small, self._small_views, strict=True)
            self._arrays = [(piece.numpy(), view.numpy()) for piece, view in pairs]

    def pack(self, contribute: float) -> Tensor:
        if not contribute:  # zero times NaN would be NaN
            return self._buffer.zero_()
        if self._pieces:
            torch.cat(self._pieces, out=self._buffer)
        return self._buffer if contribute == 1 else self._buffer.mul_(contribute)

    def unpack(self, divisor: int) -> None:
        # Dividing the sum keeps the mean of equal values exact for powers of two.
        self._divided.div_(divisor)
        if self._arrays is None:
            _copy_all_(self._small, self._small_views)
        else:
            for array, view in self._arrays:
                array[...] = view
        for piece, view in self._large:  # division and copy in one pass over the memory
            torch.div(view, divisor, out=piece)


def _finish(job: _Job, work: dist.Work, divisor: int) -> None:
    work.wait()
    job.unpack(divisor)


def _fill(flats: Sequence[Tensor], capacity: int) -> Iterator[list[Tensor]]:
    """Yield runs of pieces that fit a bucket together; what is larger than a bucket is cut."""
    run: list[Tensor] = []
    used = 0
    for flat in flats:
        for piece in flat.split(capacity):
            if used + piece.numel() > capacity:
                yield run
                run, used = [], 0
            run.append(piece)
            used += piece.numel()
    if run:
        yield run

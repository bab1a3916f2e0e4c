"""Copies of weights: split over equal replicas, and put back bit for bit."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from hdet.replicas.exchange import wait_for_all
from hdet.replicas.group import ReplicaGroup
from hdet.replicas.tensors import KnownTensors, accelerator_module, fitting, flat_view, real_view

ALONE = ReplicaGroup(0, 1)
"""For a copy that is whole in this process."""
BUCKET_BYTES = 25 * 2**20 // 2
"""Is gathered at a time. A backend may take as much again while it travels: one bucket together."""
_SEED = 0x5C0E
"""Of the random numbers that scores are made with."""


class SlicedCopy:
    """A copy of a list of tensors, split over the replicas that hold the same.

    Laid end to end, the tensors are cut into N parts of one length, and replica r keeps the r-th. Taking and
    mixing work on that part alone and send nothing. Putting back is collective: all parts are gathered, a
    bucket at a time. With a group of one it is a plain copy, and nothing is collective.

    The replicas must hold the same tensors whenever they take: parts of different replicas make no whole.

    Args:
        tensors: what is copied, or zeros for now; local parts where a replica is sharded.
        group: who holds the same; :data:`ALONE` for a whole copy.
        is_zero: begin with zeros instead of the tensors.
        widens: keep float32 where the tensors have fewer bits.
        device: where the copy lives; None for where the tensors do.

    >>> weights = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])]
    >>> copy = SlicedCopy(weights)
    >>> _ = weights[0].zero_()
    >>> copy.put(weights)
    >>> weights
    [tensor([1., 2.]), tensor([[3.]])]
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        group: ReplicaGroup = ALONE,
        *,
        is_zero: bool = False,
        widens: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        self._group = group if group.communicates else ALONE
        self.is_whole = self._group.count == 1
        """Tells whether all of it is in this process."""
        self._layouts = [_layout(tensor) for tensor in tensors]
        members: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
        for i, tensor in enumerate(tensors):
            members.setdefault((tensor.device, real_view(tensor).dtype, tensor.is_complex()), []).append(i)
        self._kinds = []
        for (home, dtype, _), indices in members.items():
            kept = torch.promote_types(dtype, torch.float32) if widens else dtype
            sizes = [real_view(tensors[i]).numel() for i in indices]
            make = partial(torch.zeros if is_zero else torch.empty, dtype=kept, device=device or home)
            self._kinds.append(_Kind(indices, sizes, self._group, make))
        self._known = KnownTensors()
        self._views: list[list[Tensor]] = []
        if not is_zero:
            self.take(tensors)

    @property
    def parts(self) -> list[Tensor]:
        """Return what this process holds, as flat tensors."""
        return [kind.kept for kind in self._kinds]

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Copy this replica's part of the tensors. Not collective."""
        for kind, views in zip(self._kinds, self._views_of(tensors), strict=True):
            if views:
                torch._foreach_copy_(kind.pieces, views)  # pyright: ignore[reportPrivateImportUsage]

    def lerp(self, tensors: Sequence[Tensor], share: float) -> None:
        """Move this replica's part by a share of the way to the tensors. Not collective."""
        for kind, views in zip(self._kinds, self._views_of(tensors), strict=True):
            if views and (views[0].dtype, views[0].device) == (kind.kept.dtype, kind.kept.device):
                torch._foreach_lerp_(kind.pieces, views, share)  # pyright: ignore[reportPrivateImportUsage]
            else:  # one wide copy at a time
                for piece, view in zip(kind.pieces, views, strict=True):
                    piece.lerp_(view.to(piece), share)

    @torch.no_grad()
    def put(self, tensors: Sequence[Tensor], what: str = "putting a copy back") -> None:
        """Give the tensors the whole copy. Collective where it is split.

        Args:
            tensors: laid out as those that were copied.
            what: it belongs to, for the error where a replica does not come.
        """
        if self.is_whole and self._known.are(tensors):
            for kind, views in zip(self._kinds, self._views, strict=True):
                if views:
                    torch._foreach_copy_(views, kind.pieces)  # pyright: ignore[reportPrivateImportUsage]
            return
        flats, borrowed = self._flats(tensors)
        for kind in self._kinds:
            if self.is_whole:
                for (i, _, _), piece in zip(kind.places, kind.pieces, strict=True):
                    flats[i].copy_(piece)
            else:
                _gather_into(kind, [flats[i] for i in kind.indices], self._group, what)
        for tensor, held in borrowed:
            tensor.copy_(held)

    def whole(self, what: str = "gathering a copy") -> list[Tensor]:
        """All of it as new tensors in host memory, laid out as those that were copied. Collective."""
        kept = {i: kind.kept.dtype for kind in self._kinds for i in kind.indices}
        made = [
            torch.empty_strided(shape, stride, dtype=kept[i].to_complex() if is_complex else kept[i])
            for i, (shape, stride, is_complex) in enumerate(self._layouts)
        ]
        self.put(made, what)
        return made

    def shaped(self) -> list[Tensor]:
        """A whole copy as tensors of the shapes that were copied, which share its memory."""
        assert self.is_whole, "a part of a copy has no shapes"
        made: dict[int, Tensor] = {}
        for kind in self._kinds:
            for i, (start, stop) in zip(kind.indices, pairwise(kind.ends), strict=True):
                shape, stride, is_complex = self._layouts[i]
                flat = kind.kept[start:stop]
                flat = torch.view_as_complex(flat.view(-1, 2)) if is_complex else flat
                made[i] = flat.as_strided(shape, stride, flat.storage_offset())
        return [made[i] for i in range(len(self._layouts))]

    # --- flat views ----------------------------------------------------------------------------------

    def _views_of(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """This replica's part of the tensors, as flat pieces, by kind."""
        if self._known.are(tensors):
            return self._views
        flats, borrowed = self._flats(tensors, reads=True)
        views = [[flats[i][start:stop] for i, start, stop in kind.places] for kind in self._kinds]
        if not borrowed:
            self._views = views
            self._known.remember(tensors)
        return views

    def _flats(
        self, tensors: Sequence[Tensor], *, reads: bool = False
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Each tensor in the order of memory; what is laid out otherwise has its contents in between."""
        flats, borrowed = [], []
        for tensor, layout in zip(tensors, self._layouts, strict=True):
            flat = flat_view(real_view(tensor)) if _layout(tensor) == layout else None
            if flat is None:
                held = torch.empty_strided(layout[0], layout[1], dtype=tensor.dtype, device=tensor.device)
                if reads:
                    held.copy_(tensor.detach())
                borrowed.append((tensor, held))
                flat = flat_view(real_view(held))
                assert flat is not None
            flats.append(flat)
        return flats, borrowed


class _Kind:
    """The tensors of one device and one dtype, laid end to end, and the part of them that is kept here."""

    def __init__(
        self, indices: list[int], sizes: list[int], group: ReplicaGroup, make: Callable[[int], Tensor]
    ) -> None:
        self.indices = indices
        self.ends = list(accumulate(sizes, initial=0))
        self.length = -(-self.ends[-1] // group.count)
        start, stop = self.range_of(group.index)
        self.kept = make(stop - start)
        self.places = [(indices[k], a, b) for k, a, b in self.spans(start, stop)]
        self.pieces = list(self.kept.split([b - a for _, a, b in self.places])) if self.places else []

    def range_of(self, replica: int) -> tuple[int, int]:
        """Where the part of a replica begins and ends."""
        total = self.ends[-1]
        return min(replica * self.length, total), min((replica + 1) * self.length, total)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Which tensors lie between these places: their number here, and from where to where."""
        first = max(0, bisect_right(self.ends, start) - 1)
        for k, (low, high) in enumerate(pairwise(self.ends[first:]), first):
            if low >= stop:
                return
            a, b = max(start, low), min(stop, high)
            if a < b:
                yield k, a - low, b - low


def _gather_into(kind: _Kind, flats: Sequence[Tensor], group: ReplicaGroup, what: str) -> None:
    """Give flat tensors all parts, a bucket at a time. Collective."""
    assert group.process_group is not None
    if not kind.length:
        return
    # What is narrower than the copy is rounded before it travels: half the bytes, the same result.
    dtype = min(flats[0].dtype, kind.kept.dtype, key=lambda one: one.itemsize)
    width = max(1, min(kind.length, BUCKET_BYTES // (dtype.itemsize * group.count)))
    bucket = torch.empty(group.count, width, dtype=dtype, device=group.device)
    for offset in range(0, kind.length, width):
        part = kind.kept[offset : offset + width]
        bucket[group.index, : part.numel()].copy_(part)
        sent = [row.view(torch.uint8) for row in bucket]  # not every backend knows every dtype
        group.traffic.num_bytes += sent[group.index].nbytes
        work = dist.all_gather(sent, sent[group.index], group=group.process_group, async_op=True)
        wait_for_all(work, group, group.process_group, what)
        for replica, row in enumerate(bucket):
            start, stop = kind.range_of(replica)
            start, place = min(start + offset, stop), 0
            for k, a, b in kind.spans(start, min(start + width, stop)):
                flats[k][a:b].copy_(row[place : place + b - a])
                place += b - a


def _layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], bool]:
    """Shape and strides without gaps: a tensor's own, or those in the usual order."""
    has_gaps = flat_view(tensor) is None
    stride = torch.empty(tensor.shape, device="meta").stride() if has_gaps else tensor.stride()
    return tensor.shape, stride, tensor.is_complex()


@dataclass(eq=False)
class WeightsCopy:
    """A copy of weights, split over replicas that hold the same, and of buffers, whole in every process.

    Buffers are small, and replicas that are equal may have other statistics: each sees its own batches.
    """

    weights: Sequence[Tensor]
    """Local parts where a replica is sharded."""
    buffers: Sequence[Tensor]
    """The model's."""
    group: ReplicaGroup
    """Replicas that hold the same weights, and a part of the copy each."""
    device: str | None = None
    """Where the copy lives; None for where the weights do."""

    def __post_init__(self) -> None:
        self._of_weights = SlicedCopy(self.weights, self.group, device=self.device)
        self._of_buffers = SlicedCopy(self.buffers, device=self.device)
        self.is_whole = self._of_weights.is_whole
        """Tells whether all of it is in this process."""

    def take(self, saved: Sequence[Tensor] | None = None) -> None:
        """Copy them anew, in the same memory, or what a checkpoint holds of a copy. Not collective."""
        tensors, count = [*self.weights, *self.buffers], len(self.weights)
        tensors = tensors if saved is None else fitting(saved, [tensor.shape for tensor in tensors])
        self._of_weights.take(tensors[:count])
        if self.buffers:
            self._of_buffers.take(tensors[count:])

    def whole(self) -> list[Tensor]:
        """All of it as new tensors in host memory, buffers last. Collective where the copy is split."""
        return [*self._of_weights.whole("a save"), *self._of_buffers.whole()]

    def put(self, what: str) -> None:
        """Put them back. Collective where the copy is split.

        Args:
            what: it belongs to, for the error where a replica does not come.
        """
        self._of_weights.put(self.weights, what)
        self.put_buffers()

    def put_buffers(self) -> None:
        """Put the buffers back. Not collective."""
        self._of_buffers.put(self.buffers)


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
    """Return what an optimizer knows, for :func:`put_state`. It goes on with a state of its own."""
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
    module = accelerator_module()
    of_device = {} if module is None else {"accelerator": module.get_rng_state()}
    return {"cpu": torch.random.get_rng_state(), **of_device}


def restore_generators(states: dict[str, Tensor]) -> None:
    """Put the states of torch's global generators back."""
    torch.random.set_rng_state(states["cpu"])
    module = accelerator_module()
    if module is not None and "accelerator" in states:
        module.set_rng_state(states["accelerator"])


@contextmanager
def keeping_generators(batches: Any) -> Iterator[None]:
    """Put the generators of a DataLoader and of its samplers back after the block."""
    kept = [(generator, generator.get_state()) for generator in _generators_of(batches)]
    try:
        yield
    finally:
        for generator, state in kept:
            generator.set_state(state)


def _generators_of(loader: Any) -> list[torch.Generator]:
    sampler, batch_sampler = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    holders = [loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
    held = [getattr(holder, "generator", None) for holder in holders]
    return [generator for generator in held if isinstance(generator, torch.Generator)]


@contextmanager
def same_draws() -> Iterator[None]:
    """Let torch draw the same random numbers in every such block, and go on after it as if there was none.

    Scores are compared with each other. A loss that draws, such as the noise of a diffusion model, would
    drown what they are to show.

    >>> with same_draws():
    ...     first = torch.rand(2)
    >>> with same_draws():
    ...     bool((torch.rand(2) == first).all())
    True
    """
    states, module = generator_states(), accelerator_module()
    torch.default_generator.manual_seed(_SEED)  # torch.manual_seed seeds every device
    if module is not None:
        module.manual_seed(_SEED)
    try:
        yield
    finally:
        restore_generators(states)

"""Health: whether tensors are finite, and a checksum that tells whether two replicas hold the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hdet.replicas.tensors import KnownTensors, flat_view

_SMALL = 2**14
"""Tensors with fewer elements are looked at together: each call costs more than their memory."""
_TOGETHER = 2**15
"""How many elements of small tensors go into one piece, and so the extra memory."""
_LONGEST = 2**18
"""A longer piece is summed in parts, whose widened copies stay in the cache."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Health:
    """Looks at a list of tensors, again and again. How to read them is worked out once.

    >>> Health().all_finite([torch.ones(3), torch.tensor([1.0, float("inf")])])
    False
    >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])
    >>> Health().checksum([one]) == Health().checksum([one.clone()]), Health().checksum([one, other]) == 0
    (True, False)
    """

    def __init__(self) -> None:
        self._known = KnownTensors()
        self._groups: list[list[Tensor]] = []

    @torch.no_grad()
    def all_finite(self, tensors: Sequence[Tensor]) -> bool:
        """Whether every element of every tensor is finite. Waits for each device once."""
        # A sum reads once and is not finite if any element is not. It can overflow though every element is
        # finite: then look at each.
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for piece in self._pieces(tensors):
            total = piece.sum(dtype=None if piece.dtype.itemsize > 2 else torch.float32)
            by_kind.setdefault((total.device, total.dtype), []).append(total)
        if all(bool(torch.isfinite(torch.stack(kind)).all()) for kind in by_kind.values()):
            return True
        return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)

    @torch.no_grad()
    def checksum(self, tensors: Sequence[Tensor]) -> int:
        """A number of 48 bits that is equal where all bits of all tensors are. Waits for each device once.

        Bit patterns are added up as integers: the sum does not depend on the order in which a device adds.
        """
        by_device: dict[torch.device, list[Tensor]] = {}
        for piece in self._pieces(tensors):
            bits = piece.view(_INTEGERS[piece.element_size()])
            totals = by_device.setdefault(piece.device, [])
            totals += [part.sum(dtype=torch.int64) for part in bits.split(_LONGEST)]
        total = 0
        for totals in by_device.values():
            for value in torch.stack(totals).tolist():
                total = (31 * total + value) % (2**48 - 59)  # a prime: the order of the pieces counts
        return total

    def _pieces(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """All elements in flat pieces: large tensors as they are, small ones side by side."""
        if not self._known.are(tensors):
            self._groups = _grouped(tensors)
            self._known.remember(tensors)
        for group in self._groups:
            yield group[0] if len(group) == 1 else torch.cat(group)


@torch.no_grad()
def rows_are_finite(matrices: Sequence[Tensor]) -> list[bool]:
    """Whether each row is finite in all of the matrices.

    >>> rows_are_finite([torch.ones(2, 3), torch.tensor([[1.0], [float("nan")]])])
    [True, False]
    """
    return torch.stack([torch.isfinite(matrix).all(dim=1) for matrix in matrices]).all(dim=0).tolist()


def _grouped(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: list[list[Tensor]] = []
    waiting: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    num_waiting = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        flat = flat_view(tensor)
        if flat is None:  # a view that does not copy: the tensor may change until it is read
            groups.append([tensor])
        elif flat.numel() >= _SMALL:
            groups.append([flat])
        else:
            waiting.setdefault((flat.device, flat.dtype), []).append(flat)
            num_waiting += flat.numel()
            if num_waiting > _TOGETHER:
                groups += waiting.values()
                waiting, num_waiting = {}, 0
    return groups + list(waiting.values())

"""Tensors as flat pieces of memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import Tensor


def flat_view(tensor: Tensor) -> Tensor | None:
    """All elements in the order of memory, or None if they do not lie side by side."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return None
            expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


class KnownTensors:
    """Remembers a list of tensors and where they lie, so that what follows from it is worked out once."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that were remembered last, at the same places."""
        addresses = list(map(Tensor.data_ptr, tensors))
        return addresses == self._addresses and all(map(operator.is_, tensors, self._tensors))

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """Call it when what follows from them is worked out: an error before that must not count."""
        self._tensors, self._addresses = list(tensors), list(map(Tensor.data_ptr, tensors))

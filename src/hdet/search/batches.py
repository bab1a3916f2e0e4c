"""Batches that never end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

Batch = TypeVar("Batch")


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches over and over. Raises where they ended and cannot start over.

    >>> stream = endless([1, 2])
    >>> [next(stream) for _ in range(5)]
    [1, 2, 1, 2, 1]
    """
    while True:
        is_empty = True
        for batch in batches:
            is_empty = False
            yield batch
        if is_empty:
            raise ValueError(
                "batches must have at least one batch, or be able to start over, but they ran out: pass the "
                "DataLoader itself, not iter(loader) or a generator"
            )

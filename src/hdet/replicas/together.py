"""Checks that one replica may fail, so that all of them raise instead of waiting for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hdet.errors import ConfigurationMismatchError
from hdet.replicas.exchange import exchange
from hdet.replicas.group import ReplicaGroup

__all__ = ["raising_together"]


class _AnotherFailed(ConfigurationMismatchError):
    """Everybody knows of it already."""


@contextmanager
def raising_together(group: ReplicaGroup) -> Iterator[None]:
    """Local checks: if they fail on one replica, all raise. Collective, once at the end of the block.

    The block must not exchange anything itself, but for a block like this one within it.
    """
    failure: Exception | None = None
    try:
        yield
    except _AnotherFailed:
        raise
    except Exception as error:  # it is raised below, once the others know
        failure = error
    if group.communicates:
        text = b"" if failure is None else f"{type(failure).__name__}: {failure}".encode()
        sizes = [int(row[0]) for row in exchange(group, [float(len(text))])]
        if any(sizes):
            padded = text.ljust(max(sizes), b" ")
            rows = exchange(group, [float(byte) for byte in padded])
            if failure is None:
                replica = next(r for r, size in enumerate(sizes) if size)
                why = bytes(int(byte) for byte in rows[replica]).decode(errors="replace").strip()
                raise _AnotherFailed(f"replica {replica} could not be built: {why}")
    if failure is not None:
        raise failure

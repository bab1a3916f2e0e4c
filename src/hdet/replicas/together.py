"""Checks that one replica may fail, so that all of them raise instead of waiting for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hdet.errors import ConfigurationMismatchError
from hdet.replicas.exchange import gather
from hdet.replicas.group import ReplicaGroup


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
    joined = [*group.within, *([group.process_group] if group.communicates else [])]
    for processes in joined:
        text = b"" if failure is None else f"{type(failure).__name__}: {failure}".encode()
        sizes = [int(row[0]) for row in gather(group, processes, [[float(len(text))]], "its construction")]
        if any(sizes):
            rows = gather(group, processes, [list(text.ljust(max(sizes), b" "))], "its construction")
            if failure is None:
                first = next(r for r, size in enumerate(sizes) if size)
                why = bytes(int(byte) for byte in rows[first]).decode(errors="replace").strip()
                failure = _AnotherFailed(f"replica {first} could not be built: {why}")
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # its traceback holds this frame: a circle that would keep everything in it alive

"""Replicas that must agree before they train: on their settings, and on whether they could be built."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from hdet.errors import ConfigurationMismatchError
from hdet.replicas.exchange import gather
from hdet.replicas.group import ReplicaGroup
from hdet.replicas.tensors import digest


class _AnotherFailed(ConfigurationMismatchError):
    """Everybody knows of it already."""


@contextmanager
def raising_together(group: ReplicaGroup) -> Iterator[None]:
    """Let all replicas raise if local checks fail on one. Collective, once at the end of the block.

    The block must not exchange anything itself, but for a block like this one within it.
    """
    failure: Exception | None = None
    try:
        yield
    except _AnotherFailed:
        raise
    except Exception as error:  # it is raised below, once the others know
        failure = error
    for joined in group.joins:
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        sizes = gather(group, joined, [[float(len(text.encode()))]], "its construction")
        if any(size for (size,) in sizes):
            reasons = _gather_texts(group, joined, text, int(max(sizes)[0]), "its construction")
            if failure is None:
                first = next(r for r, reason in enumerate(reasons) if reason)
                failure = _AnotherFailed(f"replica {first} could not be built: {reasons[first]}")
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # its traceback holds this frame: a circle that would keep everything in it alive


def require_same_settings(
    group: ReplicaGroup, settings: Mapping[str, object], here: Mapping[str, object] | None = None
) -> None:
    """Raise the same error on every replica if any setting differs between replicas.

    Different settings would otherwise show as a hang: one replica waits in a sync that another has
    not reached.

    Args:
        group: who takes part.
        settings: the same in all processes.
        here: the same in all replicas, but not in all processes of one.
    """
    for joined in group.joins:
        is_between = joined is group.process_group
        _require_same(group, joined, {**settings, **(here or {})} if is_between else settings)


def _require_same(group: ReplicaGroup, joined: dist.ProcessGroup, settings: Mapping[str, object]) -> None:
    text = json.dumps({n: repr(v) for n, v in settings.items()}, sort_keys=True)
    what = "the comparison of settings"
    seen = gather(group, joined, [[digest(text), float(len(text.encode()))]], what)
    if all(fingerprint == seen[0][0] for fingerprint, _ in seen):
        return
    # Only now is the text itself sent, so that the error can name what differs.
    size = int(max(length for _, length in seen))
    each = [json.loads(one) for one in _gather_texts(group, joined, text, size, what)]
    differing = []
    for name in sorted({name for one in each for name in one}):
        values = [one.get(name, "(missing)") for one in each]
        if len(set(values)) > 1:
            differing.append(f"{name} ({', '.join(f'replica {r}: {v}' for r, v in enumerate(values))})")
    raise ConfigurationMismatchError(
        f"all replicas must be built with the same settings, but these differ: {'; '.join(differing)}. Pass "
        "the same values on every rank"
    )


def _gather_texts(
    group: ReplicaGroup, joined: dist.ProcessGroup, text: str, size: int, what: str
) -> list[str]:
    """Every process's text, of at most ``size`` bytes. Collective."""
    rows = gather(group, joined, [list(text.encode().ljust(size, b" "))], what)
    return [bytes(int(byte) for byte in row).decode(errors="replace").strip() for row in rows]

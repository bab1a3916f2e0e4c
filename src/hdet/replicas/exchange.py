"""Small messages between replicas: one list of numbers each, and a check that settings agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from hdet.errors import ConfigurationMismatchError
from hdet.replicas.device import widest_float
from hdet.replicas.group import ReplicaGroup
from hdet.replicas.patience import wait_for_all


def exchange(group: ReplicaGroup, message: Sequence[float], what: str = "an exchange") -> list[list[float]]:
    """Every replica's message, in the order of the replicas. One collective; it waits for all.

    Args:
        group: who takes part.
        message: of this replica, as long as the others'.
        what: it belongs to, for the error where a replica does not come.
    """
    if not group.communicates:
        return [list(message)]
    assert group.process_group is not None
    return gather(group, group.process_group, [message], what)


def exchange_within(
    group: ReplicaGroup, message: Sequence[float], what: str = "an exchange"
) -> list[list[float]]:
    """The message of every process of this replica. Collective where there are several."""
    rows = [list(message)]
    for axis in group.within:
        rows = gather(group, axis, rows, what)
    return rows


def gather(
    group: ReplicaGroup, joined: dist.ProcessGroup, rows: Sequence[Sequence[float]], what: str
) -> list[list[float]]:
    """The rows of all processes of a group, one after the other. Collective."""
    mine = torch.tensor(rows, dtype=widest_float(group.device), device=group.device)
    group.traffic.add(mine)
    all_of_them = [torch.empty_like(mine) for _ in range(joined.size())]
    work = dist.all_gather(all_of_them, mine, group=joined, async_op=True)
    wait_for_all(work, group, joined, what)
    return torch.cat(all_of_them).tolist()


def digest(text: str) -> float:
    """A fingerprint of ``text`` that survives a double: 48 bits.

    >>> digest("a") == digest("a"), digest("a") == digest("b")
    (True, False)
    """
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


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
    for axis in group.within:
        _require_same(group, axis, settings)
    if group.communicates:
        assert group.process_group is not None
        _require_same(group, group.process_group, {**settings, **(here or {})})


def _require_same(group: ReplicaGroup, joined: dist.ProcessGroup, settings: Mapping[str, object]) -> None:
    text = json.dumps({name: repr(value) for name, value in settings.items()}, sort_keys=True)
    seen = gather(group, joined, [[digest(text), float(len(text.encode()))]], "the comparison of settings")
    if all(fingerprint == seen[0][0] for fingerprint, _ in seen):
        return
    # Only now is the text itself sent, so that the error can name what differs.
    size = int(max(length for _, length in seen))
    padded = text.encode().ljust(size, b" ")
    rows = gather(group, joined, [list(padded)], "the comparison of settings")
    each = [json.loads(bytes(int(byte) for byte in row)) for row in rows]
    names = sorted({name for one in each for name in one})
    lines = []
    for name in names:
        values = [one.get(name, "(missing)") for one in each]
        if len(set(values)) > 1:
            shown = ", ".join(f"replica {r}: {value}" for r, value in enumerate(values))
            lines.append(f"{name} ({shown})")
    raise ConfigurationMismatchError(
        "all replicas must be built with the same settings, but these differ: "
        + "; ".join(lines)
        + ". Pass the same values on every rank"
    )

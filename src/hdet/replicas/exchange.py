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

__all__ = ["digest", "exchange", "require_same_settings"]


def exchange(group: ReplicaGroup, message: Sequence[float], what: str = "an exchange") -> list[list[float]]:
    """Every replica's message, in the order of the replicas. One collective; it waits for all.

    Args:
        group: who takes part.
        message: of this replica, as long as the others'.
        what: it belongs to, for the error where a replica does not come.
    """
    if not group.communicates:
        return [list(message)]
    mine = torch.tensor(message, dtype=widest_float(group.device), device=group.device)
    all_of_them = [torch.empty_like(mine) for _ in range(group.count)]
    work = dist.all_gather(all_of_them, mine, group=group.process_group, async_op=True)
    wait_for_all(work, group, what)
    return torch.stack(all_of_them).tolist()


def digest(text: str) -> float:
    """A fingerprint of ``text`` that survives a double: 48 bits.

    >>> digest("a") == digest("a"), digest("a") == digest("b")
    (True, False)
    """
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


def require_same_settings(group: ReplicaGroup, settings: Mapping[str, object]) -> None:
    """Raise the same error on every replica if any setting differs between replicas.

    Different settings would otherwise show as a hang: one replica waits in a sync that another has
    not reached.
    """
    if not group.communicates:
        return
    text = json.dumps({name: repr(value) for name, value in settings.items()}, sort_keys=True)
    seen = exchange(group, [digest(text), float(len(text.encode()))])
    if all(fingerprint == seen[0][0] for fingerprint, _ in seen):
        return
    # Only now is the text itself sent, so that the error can name what differs.
    size = int(max(length for _, length in seen))
    padded = text.encode().ljust(size, b" ")
    texts = [bytes(int(byte) for byte in row) for row in exchange(group, list(padded))]
    each = [json.loads(text) for text in texts]
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

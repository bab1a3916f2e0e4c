"""Wait for all replicas, and say which one does not come."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
)

from hdet.errors import ReplicaMissingError
from hdet.replicas.group import ReplicaGroup

_log = logging.getLogger(__name__)

_RAISES_AFTER = 10
"""Times the patience: an evaluation on one rank may be long, and is no reason to lose a run."""
_LOOKS = 4
"""Within one patience, how often those who wait tell each other."""
_SILENT_LOOKS = 3
"""Who has told nothing new for so many looks is missing."""
_REMEDY = (
    "Every replica must take as many steps as the others and call step() after each: look for data that ends "
    "earlier, a skipped step() and a process that hangs, and go on from the last checkpoint"
)


def wait_for_all(work: Any, group: ReplicaGroup, joined: dist.ProcessGroup, what: str) -> None:
    """Wait for a collective; log who is missing after the group's patience, and raise after ten times it.

    The time limit of the process group itself may end it earlier.

    Those who wait write a growing number into the store that joined the processes. Whoever writes none is
    missing. Nothing is written while nobody waits for long.

    Args:
        work: of the collective.
        group: whose patience it is.
        joined: who takes part.
        what: the replicas wait for, in words.
    """
    if _completes(work, group, group.patience, what):
        return
    began, look, count = time.monotonic(), group.patience / _LOOKS, 0
    seen: dict[int, bytes] = {}
    seen_at = dict.fromkeys(range(joined.size()), 0)
    told: list[int] = []
    while True:
        count += 1
        now = _tell(joined, count)
        seen_at |= {r: count for r, value in now.items() if value != seen.get(r)}
        seen = now
        missing = [r for r, at in seen_at.items() if count - at >= _SILENT_LOOKS and r != joined.rank()]
        waited = group.patience + time.monotonic() - began
        if missing and missing != told and count > _SILENT_LOOKS:
            told = missing
            if joined.rank() == min(set(range(joined.size())) - set(missing)):  # one says it
                _log.error("%s", _sentence(missing, what, waited))
        if waited > _RAISES_AFTER * group.patience:
            raise ReplicaMissingError(f"{_sentence(missing, what, waited)}. {_REMEDY}")
        if _completes(work, group, look, what):
            return


def _completes(work: Any, group: ReplicaGroup, seconds: float, what: str) -> bool:
    if group.device.type == "cpu":
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not work.is_completed():  # only this wait is over
                return False
            _require_success(work, what)
        return True
    end = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > end:
            return False
        time.sleep(1e-4)
    return True


def _require_success(work: Any, what: str) -> None:
    """Raise what has ended a collective that is over."""
    try:
        work.wait()
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        raise ReplicaMissingError(
            f"{what} is not complete within the time limit of its process group. {_REMEDY}"
        ) from error


def _tell(joined: dist.ProcessGroup, count: int) -> dict[int, bytes]:
    """Write that this replica waits; what the others have written last."""
    store = _get_default_store()
    keys = [f"hdet/waits/{joined.group_name}/{r}" for r in range(joined.size())]
    store.set(keys[joined.rank()], str(count))
    return {r: store.get(key) for r, key in enumerate(keys) if store.check([key])}


def _sentence(missing: list[int], what: str, seconds: float) -> str:
    if not missing:
        return f"{what} is not complete after {seconds:.0f} s, though all replicas wait for it"
    who = "replica " + str(missing[0]) if len(missing) == 1 else f"replicas {missing}"
    return f"{who} did not come to {what}; the others wait since {seconds:.0f} s"

"""Short messages, one list of numbers from each process: the exchange of a sync, and what all agree on."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store  # pyright: ignore[reportPrivateUsage]
from torch.optim import Optimizer

from hdet.errors import ConfigurationMismatchError, ReplicaMissingError
from hdet.replicas.group import ReplicaGroup
from hdet.replicas.optimizers import group_values
from hdet.replicas.tensors import digest, layout_text, local_part, names_of, widest_float

_log = logging.getLogger(__name__)


class Message(NamedTuple):
    """Tells the others of a process at a sync. For one more number add a field, and say how parts join it.

    Every field is a double, so that one collective carries them all.
    """

    loss_total: float
    """Sum of the finite losses since the last sync."""
    num_finite: float
    num_nonfinite: float
    is_finite: float
    """Tells whether all parameters are, and the moments if they are averaged."""
    score: float
    """Loss on the probe; NaN where it was not asked for."""
    num_steps: float
    base: float
    """Fingerprint of the shared values."""
    checksum: float
    """Of the parameters, where they are compared; else zero."""
    moments: float
    """Fingerprint of the layout of the moments that are averaged."""

    @classmethod
    def joined(cls, messages: Sequence[Message]) -> Message:
        """One message for the processes of one replica: losses add up, all must be finite."""
        if len(messages) == 1:
            return messages[0]

        def of(field: str) -> list[float]:
            return [getattr(message, field) for message in messages]

        added = ("loss_total", "num_finite", "num_nonfinite")
        return messages[0]._replace(
            **{field: math.fsum(of(field)) for field in added},
            is_finite=min(of("is_finite")),
            score=math.fsum(of("score")) / len(messages),
            checksum=joined_checksum(of("checksum")),
            moments=joined_checksum(of("moments")),
        )


def require_in_step(messages: Sequence[Message]) -> None:
    """Raise where processes are not at the same step, or do not share the base."""
    steps = [int(message.num_steps) for message in messages]
    bases = [f"{int(message.base):012x}" for message in messages]
    for must, seen in (
        ("sync at the same step, got steps", steps),
        ("share the same base values, got fingerprints", bases),
    ):
        if len(set(seen)) > 1:
            raise ConfigurationMismatchError(
                f"replicas must {must} {seen}: call step() on every replica for the same optimizer steps, "
                "load the same checkpoint everywhere"
            )


def joined_checksum(checksums: Sequence[float]) -> float:
    """One checksum of several, of as many bits."""
    return float(sum(int(value) for value in checksums) % (2**48 - 59))


def exchange(group: ReplicaGroup, message: Sequence[float], what: str = "an exchange") -> list[list[float]]:
    """Return every replica's message, in the order of the replicas. One collective; it waits for all.

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
    """Return the message of every process of this replica. Collective where there are several."""
    rows = [list(message)]
    for axis in group.within:
        rows = gather(group, axis, rows, what)
    return rows


def exchange_with_all(
    group: ReplicaGroup, message: Sequence[float], what: str = "an exchange"
) -> list[list[float]]:
    """Return the message of every process of every replica. Collective."""
    here, width = exchange_within(group, message, what), len(message)
    rows = exchange(group, [x for row in here for x in row], what)
    return [row[i : i + width] for row in rows for i in range(0, len(row), width)]


def exchange_messages(group: ReplicaGroup, here: Message, what: str) -> list[Message]:
    """Return the messages of all replicas, each joined from those of its processes. Collective."""
    if group.within:
        parts = [Message(*row) for row in exchange_within(group, here, what)]
        require_in_step(parts)
        here = Message.joined(parts)
    joined = group.process_group if group.communicates else None
    rows = [here] if joined is None else gather(group, joined, [here], what)
    every = [Message(*row) for row in rows]
    require_in_step(every)
    if len({message.moments for message in every}) > 1:
        raise ConfigurationMismatchError(
            "replicas must hold optimizer state for the same parameters, but they do not: with local "
            "gradients a parameter that only some replicas use has state only there. Let every parameter "
            "take part in every loss, or pass moments='keep'"
        )
    return every


def gather(
    group: ReplicaGroup, joined: dist.ProcessGroup, rows: Sequence[Sequence[float]], what: str
) -> list[list[float]]:
    """Return the rows of all processes of a group, one after the other. Collective."""
    mine = torch.tensor(rows, dtype=widest_float(group.device), device=group.device)
    group.traffic.num_bytes += mine.nbytes
    all_of_them = [torch.empty_like(mine) for _ in range(joined.size())]
    work = dist.all_gather(all_of_them, mine, group=joined, async_op=True)
    wait_for_all(work, group, joined, what)
    return torch.cat(all_of_them).tolist()


# --- agreement before the training ------------------------------------------------------------------


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
        for r, reason in enumerate(_texts_that_differ(group, joined, text, "its construction")):
            if failure is None and reason:
                failure = _AnotherFailed(f"replica {r} could not be built: {reason}")
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
        compared = {**settings, **(here or {})} if joined is group.process_group else settings
        text = json.dumps({n: repr(v) for n, v in compared.items()}, sort_keys=True)
        each = list(map(json.loads, _texts_that_differ(group, joined, text, "the comparison of settings")))
        differing = []
        for name in sorted({name for one in each for name in one}):
            values = [one.get(name, "(missing)") for one in each]
            if len(set(values)) > 1:
                differing.append(f"{name} ({', '.join(f'replica {r}: {v}' for r, v in enumerate(values))})")
        if differing:
            raise ConfigurationMismatchError(
                "all replicas must be built with the same settings, but these differ: "
                f"{'; '.join(differing)}. Pass the same values on every rank"
            )


def require_same_training(
    group: ReplicaGroup,
    settings: Mapping[str, object],
    optimizer: Optimizer,
    model: nn.Module | None,
    trained: Sequence[Tensor],
    buffers: Sequence[Tensor] = (),
) -> None:
    """Raise, too, if optimizers or the order of what they train differ: layers would be mixed."""
    layout = layout_text([*map(local_part, trained), *buffers], names_of(trained, optimizer, model))
    require_same_settings(group, settings, {"parameters": layout, **group_values(optimizer)})


def _texts_that_differ(group: ReplicaGroup, joined: dist.ProcessGroup, text: str, what: str) -> list[str]:
    """Return every process's text, or nothing where all have the same. Collective."""
    seen = gather(group, joined, [[digest(text), float(len(text.encode()))]], what)
    if all(row == seen[0] for row in seen):
        return []
    # Only now is the text itself sent, so that the error can name what differs.
    size = int(max(length for _, length in seen))
    rows = gather(group, joined, [list(text.encode().ljust(size, b" "))], what)
    return [bytes(map(int, row)).decode(errors="replace").strip() for row in rows]


_num_tellings: dict[str, int] = {}
"""By process group. Blocks are collective, so that all replicas count alike."""


def telling_failures(group: ReplicaGroup) -> ReplicaGroup:
    """Give the same group, whose replicas are told within :func:`telling_others` why another has failed."""
    if not group.joins:
        return group
    name = group.joins[-1].group_name
    _num_tellings[name] = count = _num_tellings.get(name, 0) + 1
    return replace(group, failures=f"hdet/failed/{count}")


@contextmanager
def telling_others(group: ReplicaGroup) -> Iterator[None]:
    """Tell those who wait for this replica if the block fails, so that they do not wait for long."""
    try:
        yield
    except BaseException as error:
        for joined in group.joins:
            text = f"replica {group.index} has failed ({type(error).__name__}: {error})"
            _get_default_store().set(f"{group.failures}/{joined.group_name}", text)
        raise


# --- waiting -----------------------------------------------------------------------------------------

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
    if _completes_or_failed(work, group, joined, group.patience, what):
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
        if _completes_or_failed(work, group, joined, look, what):
            return


def _completes_or_failed(
    work: Any, group: ReplicaGroup, joined: dist.ProcessGroup, seconds: float, what: str
) -> bool:
    """Wait, and raise where another has told that it failed."""
    if not group.failures:
        return _completes(work, group, seconds, what)
    store, key = _get_default_store(), f"{group.failures}/{joined.group_name}"
    for _ in range(math.ceil(seconds)):
        error = None
        try:
            if _completes(work, group, 1.0, what):
                return True
        except RuntimeError as lost:  # the process of the one that failed is gone
            error = lost
        if store.check([key]):
            raise ReplicaMissingError(f"{store.get(key).decode()}, so {what} cannot be completed") from error
        if error is not None:
            raise error
    return False


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
    """Write that this replica waits, and read what the others have written last."""
    store = _get_default_store()
    keys = [f"hdet/waits/{joined.group_name}/{r}" for r in range(joined.size())]
    store.set(keys[joined.rank()], str(count))
    return {r: store.get(key) for r, key in enumerate(keys) if store.check([key])}


def _sentence(missing: list[int], what: str, seconds: float) -> str:
    if not missing:
        return f"{what} is not complete after {seconds:.0f} s, though all replicas wait for it"
    who = f"replica {missing[0]}" if len(missing) == 1 else f"replicas {missing}"
    return f"{who} did not come to {what}; the others wait since {seconds:.0f} s"

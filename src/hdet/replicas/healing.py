"""Replicas that ought to be equal and are not: who is right, and how the others get what they hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import HdetWarning, ReplicasDifferError, warn
from hdet.method.exclusion import largest_agreement
from hdet.replicas.exchange import Message, exchange_within
from hdet.replicas.group import ReplicaGroup
from hdet.replicas.tensors import averaged_tensors, local_part, parameters_of, sharded_like

_ROUNDING = 1e-4
"""Differences up to this share of a tensor's largest element may come from different hardware."""
_MOST_NAMES = 3
_MOST_IN_A_ROW = 3
"""A replica that parts from the others at so many syncs in a row has a cause that healing does not end."""

_REMEDY = (
    "Wrap the model in DistributedDataParallel, give hdet the optimizer of all trained parameters, load the "
    "same checkpoint on every rank, and perturb a start with the ensemble's own warm_start()"
)


class Verdict(NamedTuple):
    """What is known of replicas that ought to be equal."""

    agreed: list[int] | None
    """Those that hold the same finite parameters, which the others shall get; None: all shall be averaged."""
    odd: frozenset[int] = frozenset()
    """Those whose parameters are finite and differ by more than rounding."""


class Equality:
    """Judges replicas that ought to be equal, sync after sync.

    Args:
        group: who takes part.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._num_in_a_row = [0] * group.count

    def judge(
        self,
        every: Sequence[Message],
        tensors: Sequence[Tensor],
        names: Callable[[], list[str]],
        num_steps: int,
    ) -> Verdict:
        """Which replicas agree. Raises the same error on all where nobody can tell, or where healing is vain.

        Collective only where checksums of finite replicas differ.

        Args:
            every: the message of each replica, with the checksum of its parameters.
            tensors: this replica's parameters.
            names: what the user calls them.
            num_steps: where the ensemble stands.
        """
        marks = [message.checksum if message.is_finite else None for message in every]
        known = {mark for mark in marks if mark is not None}
        agreed = largest_agreement(marks)
        spoilt = {r for r, mark in enumerate(marks) if mark is None}
        odd, shown = set[int](), ""
        if len(known) > 1:
            largest, shown = self._measure(tensors, names(), [mark is not None for mark in marks])
            if largest > _ROUNDING:
                if agreed is None:
                    raise ReplicasDifferError(
                        f"at step {num_steps} all replicas must hold the same parameters, because nothing is "
                        f"explored, but they differ: {shown}. {_REMEDY}"
                    )
                odd = {r for r in range(len(marks)) if r not in agreed} - spoilt
            else:
                self._warn(
                    f"at step {num_steps} replicas that ought to be equal differ by rounding ({shown}): they "
                    f"are {'averaged' if agreed is None else 'made equal'}. Ranks on different hardware do "
                    "this"
                )
        if known:  # else nobody is left to learn from, and the ensemble stops
            self._count(odd | spoilt, num_steps)
            self._tell(odd, spoilt, shown, num_steps)
        return Verdict(agreed, frozenset(odd))

    def _count(self, bad: set[int], num_steps: int) -> None:
        self._num_in_a_row = [n + 1 if r in bad else 0 for r, n in enumerate(self._num_in_a_row)]
        lasting = [r for r, n in enumerate(self._num_in_a_row) if n >= _MOST_IN_A_ROW]
        if lasting:
            raise ReplicasDifferError(
                f"at step {num_steps} {_named(lasting)} must hold the same parameters as the other replicas, "
                f"but at {_MOST_IN_A_ROW} syncs in a row it did not, though it was given theirs. {_REMEDY}. "
                "If all this is done, look for a fault of the device"
            )

    def _tell(self, odd: set[int], spoilt: set[int], shown: str, num_steps: int) -> None:
        found = [f"the parameters of {_named(spoilt)} are not finite"] if spoilt else []
        found += [f"those of {_named(odd)} differ from the others' ({shown})"] if odd else []
        if found:
            self._warn(
                f"at step {num_steps} all replicas must hold the same parameters, but {' and '.join(found)}. "
                "Parameters, buffers and optimizer state are copied from a replica that holds them"
            )

    def _warn(self, text: str) -> None:
        if self._group.index == 0:
            warn(text, HdetWarning)

    @torch.no_grad()
    def _measure(
        self, tensors: Sequence[Tensor], names: Sequence[str], are_finite: Sequence[bool]
    ) -> tuple[float, str]:
        """The largest distance of a finite replica from their mean, and where it is. Collective.

        It is called only where checksums differ, so it takes its time: a collective for each tensor. Of a
        replica that spans several processes, all get the largest distance of any.
        """
        is_finite = are_finite[self._group.index]
        apart = []
        for tensor in tensors:
            wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
            mean = wide.clone() if is_finite else torch.zeros_like(wide)
            dist.all_reduce(mean, group=self._group.process_group)
            mean /= sum(are_finite)
            share = 0.0
            if is_finite and mean.numel() and mean.abs().max() > 0:
                share = ((wide - mean).abs().max() / mean.abs().max()).item()
            apart.append(math.inf if math.isnan(share) else share)  # the sum has overflowed
        largest = torch.tensor(apart, device=self._group.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group.process_group)
        found = sorted(zip(largest.tolist(), names, strict=True), reverse=True)
        shown = ", ".join(
            f"{name} by {share:.2g} of its size" for share, name in found[:_MOST_NAMES] if share > 0
        )
        here = max(largest.tolist(), default=0.0)
        anywhere = max(row[0] for row in exchange_within(self._group, [here]))
        return anywhere, shown or f"another part of the replica by {anywhere:.2g} of its size"


def _named(replicas: set[int] | list[int]) -> str:
    """Replicas in a sentence.

    >>> _named([1]), _named({3, 1})
    ('replica 1', 'replicas 1, 3')
    """
    numbers = ", ".join(map(str, sorted(replicas)))
    return f"replica{'s' if len(replicas) > 1 else ''} {numbers}"


@torch.no_grad()
def heal(
    group: ReplicaGroup,
    optimizer: Optimizer | None,
    model: nn.Module | None,
    donor: int,
    receivers: Collection[int],
    like_weights: Sequence[Tensor],
) -> None:
    """Copy everything from the donor to the receivers. Collective; the others stay as they are.

    It is rare, so it takes its time: a collective for each tensor, also for frozen parameters and for
    buffers that are never averaged.

    Args:
        group: who takes part.
        optimizer: its parameters and its state; None where each rank keeps a part of the state.
        model: its other parameters and its buffers.
        donor: where the copies come from.
        receivers: who gets them.
        like_weights: further tensors to copy.
    """
    assert group.process_group is not None
    source, receives = dist.get_global_rank(group.process_group, donor), group.index in receivers

    def send(tensor: Tensor) -> None:
        # As bytes, because not every backend knows every dtype.
        sent = tensor.detach().to(group.device, copy=True, memory_format=torch.contiguous_format)
        if sent.numel():
            if dist.get_rank() == source:
                group.traffic.num_bytes += sent.nbytes
            dist.broadcast(sent.view(-1).view(torch.uint8), src=source, group=group.process_group)
            if receives:
                tensor.copy_(sent)

    found = {id(tensor): tensor for tensor in averaged_tensors(optimizer, model)}
    if model is not None:
        found.update((id(tensor), tensor) for tensor in [*model.parameters(), *model.buffers()])
    for tensor in [*found.values(), *like_weights]:
        send(local_part(tensor))
    if optimizer is None:
        return
    parameters = parameters_of(optimizer)
    # What an optimizer keeps may differ in form as well: a replica may have skipped its first step.
    layout: list[Any] = [[_layout(optimizer.state.get(p, {})) for p in parameters]]
    dist.broadcast_object_list(layout, src=source, group=group.process_group, device=group.device)
    for parameter, entries in zip(parameters, layout[0], strict=True):
        here = optimizer.state[parameter] if entries else {}
        for name, (kind, device_type, value) in entries.items():
            if kind == "value":
                kept = value
            else:
                kept = here.get(name)
                if not isinstance(kept, Tensor) or _form(kept) != value:
                    device = parameter.device if device_type == parameter.device.type else device_type
                    kept = torch.zeros(value[0], dtype=value[1], device=device)
                    if value[0] == local_part(parameter).shape:
                        kept = sharded_like(kept, parameter)
                send(local_part(kept))
            if receives:
                here[name] = kept


def _layout(state: dict[str, Any]) -> dict[str, tuple[str, str, Any]]:
    """What an optimizer keeps for a parameter, without the contents of tensors."""
    return {
        name: ("tensor", kept.device.type, _form(kept)) if isinstance(kept, Tensor) else ("value", "", kept)
        for name, kept in state.items()
    }


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return local_part(tensor).shape, tensor.dtype

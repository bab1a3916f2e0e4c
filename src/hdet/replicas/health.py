"""Health: whether tensors are finite, whether replicas hold the same, and how a bad one is made well."""

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
from hdet.replicas.tensors import KnownTensors, flat_view, local_part, parameters_of, real_view, sharded_like

_SMALL = 2**14
"""Tensors with fewer elements are looked at together: each call costs more than their memory."""
_TOGETHER = 2**15
"""So many elements of small tensors go into one piece. It is the extra memory."""
_LONGEST = 2**18
"""A longer piece is summed in parts, whose widened copies stay in the cache."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROUNDING = 1e-4
"""Differences up to this share of a tensor's largest element may come from different hardware."""
_MOST_NAMES = 3
_MOST_IN_A_ROW = 3
"""A replica that parts from the others at so many syncs in a row has a cause that healing does not end."""

_REMEDY = (
    "Wrap the model in DistributedDataParallel, give hdet the optimizer of all trained parameters, load the "
    "same checkpoint on every rank, and perturb a start with the ensemble's own warm_start()"
)


class Health:
    """Looks at a list of tensors, again and again. How to read them is worked out once.

    >>> Health().all_finite([torch.ones(3), torch.tensor([1.0, float("inf")])])
    False
    >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])
    >>> Health().checksum([one]) == Health().checksum([one.clone()]), Health().checksum([one, other]) == 0
    (True, False)
    """

    def __init__(self) -> None:
        self._known = KnownTensors()
        self._kinds: list[list[list[Tensor]]] = []  # by device and dtype: pieces, of tensors side by side

    def all_finite(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether every element of every tensor is finite. Waits for each device once."""
        # A sum reads once and is not finite if any element is not. It can overflow though every element is
        # finite: then look at each.
        for pieces in self._look(tensors):
            wide = None if pieces[0][0].dtype.itemsize > 2 else torch.float32
            sums = [(p[0] if len(p) == 1 else torch.cat(p)).sum(dtype=wide) for p in pieces]
            if not math.isfinite(sums[0].item() if len(sums) == 1 else torch.stack(sums).sum().item()):
                return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
        return True

    def checksum(self, tensors: Sequence[Tensor]) -> int:
        """A number of 48 bits that is equal where all bits of all tensors are. Waits for each device once.

        Bit patterns are added up as integers: the sum does not depend on the order in which a device adds.
        """
        total = 0
        for pieces in self._look(tensors):
            bits = _INTEGERS[pieces[0][0].element_size()]
            flats = ((p[0] if len(p) == 1 else torch.cat(p)).view(bits) for p in pieces)
            sums = [part.sum(dtype=torch.int64) for flat in flats for part in flat.split(_LONGEST)]
            for value in torch.stack(sums).tolist():
                total = (31 * total + value) % (2**48 - 59)  # a prime: the order of the pieces counts
        return total

    def _look(self, tensors: Sequence[Tensor]) -> list[list[list[Tensor]]]:
        """All elements in flat pieces: large tensors as they are, small ones side by side."""
        if not self._known.are(tensors):
            self._kinds = _grouped(tensors)
            self._known.remember(tensors)
        return self._kinds


@torch.no_grad()
def rows_are_finite(matrices: Sequence[Tensor]) -> list[bool]:
    """Tell whether each row is finite in all of the matrices.

    >>> rows_are_finite([torch.ones(2, 3), torch.tensor([[1.0], [float("nan")]])])
    [True, False]
    """
    return torch.stack([torch.isfinite(matrix).all(dim=1) for matrix in matrices]).all(dim=0).tolist()


def _grouped(tensors: Sequence[Tensor]) -> list[list[list[Tensor]]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[list[Tensor]]] = {}
    num_waiting: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in map(real_view, filter(Tensor.numel, tensors)):
        kind = tensor.device, tensor.dtype
        pieces, flat = kinds.setdefault(kind, []), flat_view(tensor)
        if flat is None:  # a view that does not copy: the tensor may change until it is read
            pieces.insert(0, [tensor])
        elif flat.numel() >= _SMALL:
            pieces.insert(0, [flat])
        elif pieces and 0 < num_waiting.get(kind, 0) <= _TOGETHER:
            pieces[-1].append(flat)
            num_waiting[kind] += flat.numel()
        else:
            pieces.append([flat])
            num_waiting[kind] = flat.numel()
    return list(kinds.values())


# --- replicas that ought to be equal ------------------------------------------------------------------


class Verdict(NamedTuple):
    """Tells what is known of replicas that ought to be equal."""

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
        self, every: Sequence[Message], tensors: Sequence[Tensor], names: Callable[[], list[str]]
    ) -> Verdict:
        """Find the replicas that agree.

        It raises the same error on all where nobody can tell, or where healing is vain. Collective only where
        checksums of finite replicas differ.

        Args:
            every: the message of each replica, with the checksum of its parameters.
            tensors: this replica's parameters.
            names: what the user calls them.
        """
        marks = [message.checksum if message.is_finite else None for message in every]
        if not any(message.is_finite for message in every):
            return Verdict(None)  # nobody is left to learn from, and the ensemble stops
        agreed = largest_agreement(marks)
        spoilt = {r for r, mark in enumerate(marks) if mark is None}
        found = [f"the parameters of {_named(spoilt)} are not finite"] if spoilt else []
        odd = set[int]()
        at_step = f"at step {every[0].num_steps:.0f}"
        if len({*marks} - {None}) > 1:
            largest, shown = self._measure(tensors, names(), [mark is not None for mark in marks])
            if largest <= _ROUNDING:
                self._warn(
                    f"{at_step} replicas that ought to be equal differ by rounding ({shown}): they are "
                    f"{'averaged' if agreed is None else 'made equal'}. Ranks on different hardware do this"
                )
            elif agreed is None:
                raise ReplicasDifferError(
                    f"{at_step} all replicas must hold the same parameters, because nothing is explored, but "
                    f"they differ: {shown}. {_REMEDY}"
                )
            else:
                odd = {*range(len(marks))} - {*agreed} - spoilt
                found.append(f"those of {_named(odd)} differ from the others' ({shown})")
        self._num_in_a_row = [n + 1 if r in odd | spoilt else 0 for r, n in enumerate(self._num_in_a_row)]
        lasting = {r for r, n in enumerate(self._num_in_a_row) if n >= _MOST_IN_A_ROW}
        if lasting:
            raise ReplicasDifferError(
                f"{at_step} {_named(lasting)} must hold the same parameters as the other replicas, but at "
                f"{_MOST_IN_A_ROW} syncs in a row it did not, though it was given theirs. {_REMEDY}. If all "
                "this is done, look for a fault of the device"
            )
        if found:
            self._warn(
                f"{at_step} all replicas must hold the same parameters, but {' and '.join(found)}. "
                "Parameters, buffers and optimizer state are copied from a replica that holds them"
            )
        return Verdict(agreed, frozenset(odd))

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
        here = found[0][0] if found else 0.0
        anywhere = max(row[0] for row in exchange_within(self._group, [here]))
        named = [f"{name} by {share:.2g} of its size" for share, name in found[:_MOST_NAMES] if share > 0]
        return anywhere, ", ".join(named) or f"another part of the replica by {anywhere:.2g} of its size"


def _named(replicas: Collection[int]) -> str:
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

    parameters = parameters_of(optimizer)
    of_model = [] if model is None else [*model.parameters(), *model.buffers()]
    for tensor in {id(one): one for one in [*parameters, *of_model, *like_weights]}.values():
        send(local_part(tensor))
    if optimizer is None:
        return
    # What an optimizer keeps may differ in form as well: a replica may have skipped its first step.
    layout: list[Any] = [[_layout(optimizer.state.get(p, {})) for p in parameters]]
    dist.broadcast_object_list(layout, src=source, group=group.process_group, device=group.device)
    for parameter, entries in zip(parameters, layout[0], strict=True):
        here = optimizer.state[parameter] if entries else {}
        for name, (kept, device_type, form) in entries.items():
            if form is not None:
                kept = here.get(name)
                if not isinstance(kept, Tensor) or _form(kept) != form:
                    device = parameter.device if device_type == parameter.device.type else device_type
                    kept = torch.zeros(form[0], dtype=form[1], device=device)
                    if form[0] == local_part(parameter).shape:
                        kept = sharded_like(kept, parameter)
                send(local_part(kept))
            if receives:
                here[name] = kept


def _layout(state: dict[str, Any]) -> dict[str, tuple[Any, str, Any]]:
    """List what an optimizer keeps for a parameter: a value, or device and form of a tensor."""
    return {
        name: (None, kept.device.type, _form(kept)) if isinstance(kept, Tensor) else (kept, "", None)
        for name, kept in state.items()
    }


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return local_part(tensor).shape, tensor.dtype

"""Give replicas all that another one holds: parameters, buffers, the optimizer's state."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas.group import ReplicaGroup
from hdet.replicas.shards import local_part, sharded_like
from hdet.replicas.tensors import averaged_tensors, parameters_of


@torch.no_grad()
def heal(
    group: ReplicaGroup,
    optimizer: Optimizer | None,
    model: nn.Module | None,
    *,
    receivers: Collection[int],
    donor: int,
    like_weights: Sequence[Tensor],
) -> None:
    """Copy everything from the donor to the receivers. Collective; the others stay as they are.

    It is rare, so it takes its time: a collective for each tensor, also for frozen parameters and for
    buffers that are never averaged.

    Args:
        group: who takes part.
        optimizer: its parameters and its state; None where each rank keeps a part of the state.
        model: its other parameters and its buffers.
        receivers: who gets the copies.
        donor: where they come from.
        like_weights: further tensors to copy.
    """
    sender = _Sender(group, donor, receives=group.index in receivers)
    found = {id(tensor): tensor for tensor in averaged_tensors(optimizer, model)}
    if model is not None:
        found.update((id(tensor), tensor) for tensor in [*model.parameters(), *model.buffers()])
    for tensor in [*found.values(), *like_weights]:
        sender.send(local_part(tensor))
    if optimizer is None:
        return
    parameters = parameters_of(optimizer)
    # What an optimizer keeps may differ in form as well: a replica may have skipped its first step.
    layout = sender.send_object([_layout(optimizer.state.get(p, {})) for p in parameters])
    for parameter, entries in zip(parameters, layout, strict=True):
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
                sender.send(local_part(kept))
            if sender.receives:
                here[name] = kept


def _layout(state: dict[str, Any]) -> dict[str, tuple[str, str, Any]]:
    """What an optimizer keeps for a parameter, without the contents of tensors."""
    return {
        name: ("tensor", kept.device.type, _form(kept)) if isinstance(kept, Tensor) else ("value", "", kept)
        for name, kept in state.items()
    }


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return local_part(tensor).shape, tensor.dtype


class _Sender:
    """Sends tensors and small objects from one replica to all; only receivers keep them."""

    def __init__(self, group: ReplicaGroup, donor: int, *, receives: bool) -> None:
        assert group.process_group is not None
        self._process_group, self._device = group.process_group, group.device
        self._traffic = group.traffic
        self._source = dist.get_global_rank(group.process_group, donor)
        self.receives = receives

    def send(self, tensor: Tensor) -> None:
        # As bytes, because not every backend knows every dtype.
        sent = tensor.detach().to(self._device, copy=True, memory_format=torch.contiguous_format)
        if sent.numel():
            if dist.get_rank() == self._source:
                self._traffic.add(sent)
            dist.broadcast(sent.view(-1).view(torch.uint8), src=self._source, group=self._process_group)
            if self.receives:
                tensor.copy_(sent)

    def send_object(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=self._source, group=self._process_group, device=self._device)
        return box[0]

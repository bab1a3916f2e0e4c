"""Parameters of which a process holds a part: fully_shard, HSDP, tensor parallelism (DTensors)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a DTensor: a process holds its own part of it."""
    # By name: importing the class takes as long as importing half of torch.
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that is in this process; changing it changes the tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue, reportReturnType]


class LocalParts:
    """The local parts of a list of tensors, the same objects while they stay where they are."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The parts, in order. Tensors that are whole are their own."""
        return [self._part(tensor) if is_sharded(tensor) else tensor for tensor in tensors]

    def _part(self, tensor: Tensor) -> Tensor:
        part = local_part(tensor)
        owner, known = self._known.get(id(tensor), (None, part))
        if owner is not tensor or known.data_ptr() != part.data_ptr():
            known = part
        self._known[id(tensor)] = (tensor, known)
        return known


@torch.no_grad()
def clip_gradients(parameters: Sequence[Tensor], max_norm: float) -> None:
    """Clip gradients by their norm, also where parameters lie on different meshes, which torch's own refuses.

    A gradient that tensor parallelism holds on several ranks counts once.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(is_sharded(gradient) for gradient in gradients):
        nn.utils.clip_grad_norm_(parameters, max_norm)
        return
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    whole: list[Any] = [norm.full_tensor() if is_sharded(norm) else norm for norm in norms]  # pyright: ignore[reportAttributeAccessIssue]
    factor = (max_norm / (torch.linalg.vector_norm(torch.stack(whole)) + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local_part(gradient).mul_(factor)


def reshard(model: nn.Module | None) -> None:
    """Let modules of fully_shard forget the whole parameters that they may still hold.

    After an evaluation the outermost one keeps them, and would not see what is written to the parts.
    """
    for module in [] if model is None else model.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            module.reshard()  # pyright: ignore[reportCallIssue]


def as_saved(parts: Sequence[Tensor], owners: Sequence[Tensor], *, copies: bool = True) -> list[Tensor]:
    """What a checkpoint holds of tensors laid out as the local parts of their owners: copies in host memory.

    Where the owner is sharded so is the copy, which ``torch.distributed.checkpoint`` can save.
    """
    return [
        sharded_like(part.detach().to("cpu", copy=copies), owner)
        for part, owner in zip(parts, owners, strict=True)
    ]


def sharded_like(part: Tensor, owner: Any) -> Tensor:
    """A tensor of which this process holds this part, sharded as its owner is."""
    if not is_sharded(owner):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part.to(owner.to_local().device),
        owner.device_mesh,
        owner.placements,
        run_check=False,
        shape=owner.shape,
        stride=owner.stride(),
    )

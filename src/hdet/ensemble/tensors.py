"""What is averaged at a sync."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas.exchange import digest

__all__ = ["averaged_tensors", "layout_text"]


def averaged_tensors(optimizer: Optimizer, model: nn.Module | None) -> list[Tensor]:
    """Parameters of the optimizer, trainable parameters and floating-point buffers of the model."""
    found: dict[int, Tensor] = {}
    for group in optimizer.param_groups:
        found.update((id(p), p) for p in group["params"])
    if model is not None:
        found.update((id(p), p) for p in model.parameters() if p.requires_grad)
        for buffer in model.buffers():
            if buffer.is_floating_point() or buffer.is_complex():
                found[id(buffer)] = buffer
    return list(found.values())


def layout_text(tensors: Sequence[Tensor]) -> str:
    """A description that is equal where the tensors can be averaged with each other."""
    layout = digest(repr([(tuple(t.shape), t.stride(), str(t.dtype)) for t in tensors]))
    return f"{len(tensors)} tensors, {sum(t.numel() for t in tensors)} elements, layout {int(layout):012x}"

"""What is averaged at a sync."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from hdet.hyperparameters import Dial
from hdet.replicas.exchange import digest

__all__ = ["averaged_tensors", "layout_text", "moments_differ"]


def averaged_tensors(
    optimizer: Optimizer, model: nn.Module | None, *, with_moments: bool = False
) -> list[Tensor]:
    """Parameters of the optimizer, trainable parameters and floating-point buffers of the model.

    With ``with_moments`` also what the optimizer keeps for each parameter, such as its momentum.
    """
    found: dict[int, Tensor] = {}
    for group in optimizer.param_groups:
        found.update((id(p), p) for p in group["params"])
    if model is not None:
        found.update((id(p), p) for p in model.parameters() if p.requires_grad)
        for buffer in model.buffers():
            if buffer.is_floating_point() or buffer.is_complex():
                found[id(buffer)] = buffer
    if with_moments:
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            for kept in optimizer.state.get(parameter, {}).values():
                if isinstance(kept, Tensor) and kept.is_floating_point() and kept.shape == parameter.shape:
                    found[id(kept)] = kept
    return list(found.values())


def moments_differ(optimizer: Optimizer, dials: Sequence[Dial]) -> bool:
    """Whether replicas with one shared gradient end a round with different optimizer moments.

    They do where a momentum is explored, and where weight decay is added to the gradient: each replica
    then adds its own parameters.
    """
    is_coupled = any(
        group.get("weight_decay", 0) > 0
        and not group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))
        for group in optimizer.param_groups
    )
    return is_coupled or any(dial.changes_moments for dial in dials)


def layout_text(tensors: Sequence[Tensor]) -> str:
    """A description that is equal where the tensors can be averaged with each other."""
    layout = digest(repr([(tuple(t.shape), t.stride(), str(t.dtype)) for t in tensors]))
    return f"{len(tensors)} tensors, {sum(t.numel() for t in tensors)} elements, layout {int(layout):012x}"

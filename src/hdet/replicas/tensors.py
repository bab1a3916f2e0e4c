"""What is averaged at a sync."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from hdet.replicas.exchange import digest


def parameters_of(optimizer: object) -> list[Tensor]:
    """What an optimizer trains; empty for what is none."""
    groups = getattr(optimizer, "param_groups", [])
    return [p for group in groups for p in group["params"]]


def averaged_tensors(optimizer: Optimizer | None, model: nn.Module | None) -> list[Tensor]:
    """Parameters of the optimizer and trainable parameters of the model."""
    found = {id(p): p for p in parameters_of(optimizer)}
    if model is not None:
        found.update((id(p), p) for p in model.parameters() if p.requires_grad)
    return list(found.values())


def moments_of(optimizer: Optimizer) -> list[Tensor]:
    """What the optimizer keeps for each parameter, in the parameter's shape."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        kept
        for parameter in parameters
        for kept in optimizer.state.get(parameter, {}).values()
        if isinstance(kept, Tensor) and kept.is_floating_point() and kept.shape == parameter.shape
    ]


class Buffers:
    """The model's floating-point buffers, and how they last were when all was well.

    Buffers that are not finite from the start are no statistics but constants, such as attention masks:
    they are left alone.
    """

    def __init__(self, model: nn.Module | None) -> None:
        buffers = [] if model is None else list(model.buffers())
        self.tensors = [b for b in buffers if b.is_floating_point() and bool(torch.isfinite(b).all())]
        self._good = [b.detach().clone() for b in self.tensors]

    @torch.no_grad()
    def put_back(self) -> None:
        """After averaging: put back what is not finite, remember the rest.

        DistributedDataParallel copies rank zero's buffers to all ranks at every forward pass, a NaN too.
        """
        for buffer, good in zip(self.tensors, self._good, strict=True):
            if torch.isfinite(buffer).all():
                good.copy_(buffer)
            else:
                buffer.copy_(good)


def has_coupled_decay(optimizer: Optimizer) -> bool:
    """Whether weight decay is added to the gradient, as in SGD and Adam; not in AdamW."""
    return any(
        group.get("weight_decay", 0) > 0
        and not group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))
        for group in optimizer.param_groups
    )


def is_dry_step(optimizer: Optimizer) -> bool:
    """Whether the step that was just made has moved nothing and was not meant to.

    ``torch.distributed.checkpoint`` makes such a step, with learning rates and gradients of zero, so that the
    optimizer has a state to save or to load into.
    """
    for group in optimizer.param_groups:  # most steps end here, and no device is asked
        lr = group.get("lr", 0.0)
        if (isinstance(lr, Tensor) and lr.device.type != "cpu") or lr != 0:
            return False
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return bool(gradients) and not any(bool(gradient.any()) for gradient in gradients)


def layout_text(tensors: Sequence[Tensor]) -> str:
    """A description that is equal where the tensors can be averaged with each other."""
    layout = digest(repr([(tuple(t.shape), t.stride(), str(t.dtype)) for t in tensors]))
    return f"{len(tensors)} tensors, {sum(t.numel() for t in tensors)} elements, layout {int(layout):012x}"


def names_of(tensors: Sequence[Tensor], optimizer: Optimizer, model: nn.Module | None) -> list[str]:
    """What a user calls these parameters: the model's name, or the place in the optimizer."""
    known: dict[int, str] = {}
    for g, group in enumerate(optimizer.param_groups):
        known.update((id(p), f"parameter {i} of group {g}") for i, p in enumerate(group["params"]))
    if model is not None:
        for name, p in model.named_parameters():  # of DistributedDataParallel and of torch.compile
            known[id(p)] = repr(name.replace("_orig_mod.", "").removeprefix("module."))
    return [known.get(id(tensor), "a parameter") for tensor in tensors]

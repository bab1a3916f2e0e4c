"""The tensors of a replica: what is averaged, the parts that are here, flat views, devices."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import AdamW, Optimizer

from hdet.errors import HdetError, bad_argument


def accelerator() -> torch.device | None:
    """The accelerator that this process can use, or None.

    A build of torch for CUDA names ``cuda`` also on a machine without a device, so it is asked first.
    """
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def accelerator_module() -> Any:
    """``torch.cuda``, ``torch.mps`` or another module of that kind; None without an accelerator."""
    device = accelerator()
    return None if device is None else torch.get_device_module(device)


def widest_float(device: torch.device) -> torch.dtype:
    """Double precision where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def real_view(tensor: Tensor) -> Tensor:
    """The tensor without its graph; a complex one as pairs of real numbers."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def flat_view(tensor: Tensor) -> Tensor | None:
    """All elements in the order of memory, or None if they do not lie side by side."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return None
            expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


class KnownTensors:
    """Remembers a list of tensors and where they lie, so that what follows from it is worked out once."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether these are the tensors that were remembered last, at the same places.

        Views that are made anew at every call, such as local parts, are the same if they show the same
        memory. It cannot belong to another tensor meanwhile, because the old view keeps it.
        """
        if list(map(Tensor.data_ptr, tensors)) != self._addresses:
            return False
        return all(map(operator.is_, tensors, self._tensors)) or all(
            _form(new) == _form(old) for new, old in zip(tensors, self._tensors, strict=True)
        )

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """Call it when what follows from them is worked out: an error before that must not count."""
        self._tensors = list(tensors)
        self._addresses = list(map(Tensor.data_ptr, tensors))


def _form(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def is_sharded(tensor: object) -> bool:
    """Tell whether a tensor is a DTensor: a process holds its own part of it."""
    return _is_dtensor(type(tensor))


@functools.cache
def _is_dtensor(kind: type) -> bool:
    # By name: importing the class takes as long as importing half of torch.
    return any(base.__name__ == "DTensor" for base in kind.__mro__)


def local_part(tensor: Any) -> Tensor:
    """The part of a tensor that is in this process; changing it changes the tensor."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def whole(tensor: Any) -> Tensor:
    """The tensor itself, or all of one that is sharded. Collective then."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


@torch.no_grad()
def clip_gradients(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Clip gradients by their norm, also where parameters lie on different meshes, which torch's own refuses.

    A gradient that tensor parallelism holds on several ranks counts once. Returns the norm before.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(is_sharded(gradient) for gradient in gradients):
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    norms = torch.stack([whole(torch.linalg.vector_norm(gradient)) for gradient in gradients])
    norm = torch.linalg.vector_norm(norms)
    for gradient in gradients:
        local_part(gradient).mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def fully_sharded(model: nn.Module | None) -> list[Any]:
    """List the modules of fully_shard."""
    modules: list[Any] = [] if model is None else list(model.modules())
    return [m for m in modules if any(kind.__name__ == "FSDPModule" for kind in type(m).__mro__)]


def reshard(model: nn.Module | None) -> None:
    """Let modules of fully_shard forget the whole parameters that they may still hold.

    After an evaluation the outermost one keeps them, and would not see what is written to the parts.
    """
    for module in fully_sharded(model):
        module.reshard()


def fitting(saved: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Tensors of a checkpoint in these shapes: of another number of rows, the first one stands for all."""
    parts = zip(map(local_part, saved), shapes, strict=True)
    return [part if part.shape == shape else part[:1].expand(shape) for part, shape in parts]


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


def parameters_of(optimizer: object) -> list[Tensor]:
    """List what an optimizer trains; nothing for what is none."""
    return [p for group in getattr(optimizer, "param_groups", []) for p in group["params"]]


def require_initialized(parameters: Iterable[Tensor]) -> None:
    """Raise where a lazy module has not made its parameters yet."""
    if count := sum(map(is_lazy, set(parameters))):
        must, got = "must have its parameters", f"{count} of lazy modules that have no shape yet"
        raise bad_argument("model", must, got, "call it once on a batch, then build the optimizer")


def averaged_tensors(optimizer: Optimizer | None, model: nn.Module | None) -> list[Tensor]:
    """Parameters of the optimizer and trainable parameters of the model."""
    return AveragedTensors(optimizer, model).now()


class AveragedTensors:
    """Lists what is averaged, again and again: the optimizer's parameters and the model's trainable ones.

    It walks through the model only after a change.

    Args:
        optimizer: the inner one, or None.
        model: the user's, or None.
        keeps_count: raise where more or fewer of them are trained than before.
    """

    def __init__(
        self, optimizer: Optimizer | None, model: nn.Module | None, *, keeps_count: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._model = model
        self._keeps_count = keeps_count
        self._held: list[dict[str, Any]] = []  # of each module: its parameters, and its modules
        self._seen: list[Any] = []
        self._tensors: list[Tensor] = []
        self.of_model: list[Tensor] = []
        """All parameters of the model, as they were found last."""
        self.are_sharded = False
        """Tells if a process holds parts of them."""

    def now(self) -> list[Tensor]:
        """List them; the very same list as before, where all of them and all modules are the same."""
        if not self._seen or not _are_same(self._look(), self._seen):
            if self._model is not None:
                modules = self._model.modules()
                self._held = [held for m in modules for held in (m._parameters, m._modules)]  # noqa: SLF001
                self.of_model = list(self._model.parameters())
            trained = [*parameters_of(self._optimizer), *(p for p in self.of_model if p.requires_grad)]
            tensors = list({id(p): p for p in trained}.values())
            if self._keeps_count and self._seen and len(tensors) != len(self._tensors):
                raise HdetError(
                    f"{len(tensors)} parameters are trained now, but {len(self._tensors)} were when the "
                    "ensemble was built: give the optimizer all parameters, and set requires_grad, before"
                )
            self._tensors = tensors
            self.are_sharded = any(map(is_sharded, self._tensors))
            self._seen = self._look()
        return self._tensors

    def _look(self) -> list[Any]:
        seen: list[Any] = [p.requires_grad for p in self.of_model]
        for held in self._held:
            seen += held.values()
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                seen += group["params"]
        return seen


def _are_same(new: Sequence[Any], old: Sequence[Any]) -> bool:
    return len(new) == len(old) and all(map(operator.is_, new, old))


def moments_of(optimizer: Optimizer) -> list[Tensor]:
    """List what the optimizer keeps for each parameter, in the parameter's shape."""
    return [
        kept
        for parameter in parameters_of(optimizer)
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
        """Put back what is not finite, remember the rest.

        DistributedDataParallel copies rank zero's buffers to all ranks at every forward pass, a NaN too.
        """
        for buffer, good in zip(self.tensors, self._good, strict=True):
            if torch.isfinite(buffer).all():
                good.copy_(buffer)
            else:
                buffer.copy_(good)


def has_coupled_decay(optimizer: Optimizer) -> bool:
    """Tell whether weight decay is added to the gradient, as in SGD and Adam; not in AdamW."""
    decayed = [group for group in optimizer.param_groups if group.get("weight_decay", 0) > 0]
    return not all(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)) for group in decayed)


def is_dry_step(optimizer: Optimizer) -> bool:
    """Tell whether the step that was just made has moved nothing and was not meant to.

    ``torch.distributed.checkpoint`` makes such a step, with learning rates and gradients of zero, so that the
    optimizer has a state to save or to load into.
    """
    for group in optimizer.param_groups:  # most steps end here, and no device is asked
        lr = group.get("lr", 0.0)
        if (isinstance(lr, Tensor) and lr.device.type != "cpu") or lr != 0:
            return False
    gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    return bool(gradients) and not any(bool(gradient.any()) for gradient in gradients)


def digest(text: str) -> float:
    """A fingerprint of ``text`` that survives a double: 48 bits.

    >>> digest("a") == digest("a"), digest("a") == digest("b")
    (True, False)
    """
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


def layout_text(tensors: Sequence[Tensor], names: Sequence[str] = ()) -> str:
    """A description that is equal where the tensors, of these names, can be averaged with each other."""
    layout = digest(repr([(tuple(t.shape), t.stride(), str(t.dtype)) for t in tensors]))
    order = f", order {int(digest(repr(names))):012x}" if names else ""
    number = sum(t.numel() for t in tensors)
    return f"{len(tensors)} tensors, {number} elements, layout {int(layout):012x}{order}"


def names_of(tensors: Sequence[Tensor], optimizer: Optimizer, model: nn.Module | None) -> list[str]:
    """Name these parameters as a user does: the model's name, or the place in the optimizer."""
    known: dict[int, str] = {}
    for g, group in enumerate(optimizer.param_groups):
        known.update((id(p), f"parameter {i} of group {g}") for i, p in enumerate(group["params"]))
    if model is not None:
        for name, p in model.named_parameters():  # of DistributedDataParallel and of torch.compile
            known[id(p)] = repr(name.replace("_orig_mod.", "").removeprefix("module."))
    return [known.get(id(tensor), "a parameter") for tensor in tensors]

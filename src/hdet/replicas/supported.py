"""What is refused, with the reason: models and optimizers that would silently be trained wrong."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from hdet.replicas.wrapped import is_a

__all__ = ["require_supported"]

_SHARDED_OPTIMIZERS = (
    "ZeroRedundancyOptimizer",
    "OSS",
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
)


def require_supported(layers: Sequence[Optimizer], model: nn.Module | None) -> None:
    """Raise for what does not hold a whole replica in this process, and for a model of another optimizer.

    Args:
        layers: of :func:`hdet.replicas.wrapped.optimizer_layers`.
        model: what is trained, if it is known.
    """
    modules = [] if model is None else list(model.modules())
    for name, things in (("optimizer", layers), ("model", modules)):
        for thing in things:
            if any(kind.__module__.split(".")[0] == "torchft" for kind in type(thing).__mro__):
                raise TypeError(
                    f"{name} must not be torchft's, got a {type(thing).__name__}: each of its replica groups "
                    "sees one replica alone, so hdet has nobody to compare or average with. Use "
                    "DistributedDataParallel and a plain optimizer"
                )
    for layer in layers:
        for kind in _SHARDED_OPTIMIZERS:
            if is_a(layer, kind):
                raise TypeError(
                    f"optimizer must step all parameters in every process, got a {kind}: each rank steps its "
                    "part with its own learning rate and sends it to the others. Use a plain optimizer"
                )
    held = {id(p): p for group in layers[-1].param_groups for p in group["params"]}
    of_model = {} if model is None else {id(p): p for p in model.parameters()}
    if any(is_a(module, "FullyShardedDataParallel") for module in modules):
        raise TypeError(
            "model must hold whole parameters in every process, got a FullyShardedDataParallel: each rank "
            "holds another shard behind one parameter. Use fully_shard, or DistributedDataParallel"
        )
    if of_model and not held.keys() & of_model.keys():
        raise ValueError(
            "model must have parameters that the optimizer trains, got a "
            f"{type(model).__name__} that shares none with it: build the optimizer from model.parameters(), "
            "after the model was moved or wrapped"
        )

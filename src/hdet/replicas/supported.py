"""What is refused, with the reason: models and optimizers that would silently be trained wrong."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from hdet.replicas.wrapped import is_a, partitioning_layer

_REFUSED_OPTIMIZERS = {
    "OSS": "it was not tried. Use torch's ZeroRedundancyOptimizer",
    "BF16_Optimizer": 'its masters were not tried. Set "zero_optimization" without "bf16"',
    "DeepSpeedZeroOptimizer_Stage3": "no rank holds the parameters. Use ZeRO stage 1 or 2, or fully_shard",
}


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
        for kind, why in _REFUSED_OPTIMIZERS.items():
            if is_a(layer, kind):
                raise TypeError(f"optimizer must be one that hdet knows, got a {kind}: {why}")
    held = {id(p): p for group in layers[-1].param_groups for p in group["params"]}
    of_model = {} if model is None else {id(p): p for p in model.parameters()}
    if any(is_a(module, "FullyShardedDataParallel") for module in modules):
        raise TypeError(
            "model must hold whole parameters in every process, got a FullyShardedDataParallel: each rank "
            "holds another shard behind one parameter. Use fully_shard, or DistributedDataParallel"
        )
    if partitioning_layer(layers) is not None:  # what it trains may be parts that it has cut out itself
        return
    if of_model and not held.keys() & of_model.keys():
        raise ValueError(
            "model must have parameters that the optimizer trains, got a "
            f"{type(model).__name__} that shares none with it: build the optimizer from model.parameters(), "
            "after the model was moved or wrapped"
        )


def require_whole_optimizer(layers: Sequence[Optimizer]) -> None:
    """Raise where a rank steps a part of the parameters: trials of different ranks would be mixed."""
    kind = partitioning_layer(layers)
    if kind is not None:
        raise TypeError(
            f"optimizer must step all parameters in every process while ranks make different trials, got a "
            f"{kind}: each rank steps its part with its own learning rate and sends it to the others. Search "
            f"with a plain optimizer, then build the {kind} and give AutoLR what was found"
        )

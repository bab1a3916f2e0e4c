"""The table of optimizers, models and schedules that would silently be trained wrong, with the remedy.

To refuse one more, add a line to the table.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from torch import nn
from torch.optim import Optimizer

from hdet.replicas.optimizers import partitioning_layer
from hdet.replicas.tensors import parameters_of, require_initialized

Use = Literal["always", "differ", "search"]
"""When something is refused: always, where replicas differ, or in a search."""

_PARTS = "each rank steps its part with its own learning rate and sends it to the others"
_AT_SPREAD_0 = "Set every spread to 0 and share gradients, or use"
_KNOWN = "be one that hdet knows"
_NO_WHOLE_PARAMETERS = "no rank holds the parameters. Use ZeRO stage 1 or 2, or fully_shard"
_PARTITIONED = ("ZeroRedundancyOptimizer", "DeepSpeedZeroOptimizer")
_TORCHFT = (
    "each of its replica groups sees one replica alone, so hdet has nobody to compare or average with. Use "
    "DistributedDataParallel and a plain optimizer"
)


class Refusal(NamedTuple):
    """One line of the table."""

    kinds: tuple[str, ...]
    """Names of classes, alone or with their module, with all that derive from them; ``*`` stands for all.
    Not the classes themselves: importing some of them takes as long as importing half of torch."""
    must: str
    """The rule, after the name of the argument."""
    why: str
    """The reason, and what to use instead; ``{}`` stands for the class."""
    use: Use = "always"
    got: str = "a {}"
    """Names the class."""
    error: type[Exception] = TypeError


OPTIMIZERS = [
    Refusal(("torchft.*",), "not be torchft's", _TORCHFT),
    Refusal(("OSS",), _KNOWN, "it was not tried. Use torch's ZeroRedundancyOptimizer"),
    Refusal(
        ("BF16_Optimizer",), _KNOWN, 'its masters were not tried. Set "zero_optimization" without "bf16"'
    ),
    Refusal(("DeepSpeedZeroOptimizer_Stage3",), _KNOWN, _NO_WHOLE_PARAMETERS),
    Refusal(
        _PARTITIONED,
        "step all parameters in every process where replicas differ",
        f"{_PARTS}. {_AT_SPREAD_0} a plain optimizer",
        "differ",
    ),
    Refusal(
        _PARTITIONED,
        "step all parameters in every process while ranks make different trials",
        f"{_PARTS}. Search with a plain optimizer, then build the {{}} and give AutoLR what was found",
        "search",
    ),
    Refusal(
        ("LBFGS",),
        "make one step per call where replicas differ",
        "replicas would evaluate their closures a different number of times and wait for each other forever. "
        f"{_AT_SPREAD_0} another optimizer",
        "differ",
        "{}",
    ),
    Refusal(
        ("LBFGS",), "step without a closure", "it searches along a line by itself", "search", "{}", ValueError
    ),
    Refusal(
        ("*ScheduleFree*", "ASGD", "Lookahead"),
        "not average the weights over time itself where replicas differ",
        "its averages and their weights follow each replica's learning rate and part for good. "
        f"{_AT_SPREAD_0} a plain optimizer with average_tail",
        "differ",
        "{}",
    ),
]

MODELS = [
    Refusal(("torchft.*",), "not be torchft's", _TORCHFT),
    Refusal(
        ("FullyShardedDataParallel",),
        "hold whole parameters in every process",
        "each rank holds another shard behind one parameter. Use fully_shard, or DistributedDataParallel",
    ),
]

SCHEDULERS = [
    Refusal(
        ("Optimizer",),
        "be a schedule such as a torch LRScheduler",
        "leave it out for constant values",
        got="the optimizer {}",
    ),
    Refusal(
        ("timm.*",),
        "move on at step() alone",
        "use a torch LRScheduler, such as LambdaLR with its shape",
        got="timm's {}, which asks for the number of the epoch or update",
    ),
    Refusal(
        ("ReduceLROnPlateau",),
        "plan by steps alone",
        "use a schedule of steps, or a constant plan",
        got="a {}, which asks for a metric at each",
    ),
]


def refuse(name: str, things: Iterable[object], table: Sequence[Refusal], use: Use = "always") -> None:
    """Raise for the first of these things that the table names.

    Args:
        name: of the argument.
        things: what the user has given, and what is inside.
        table: what is refused.
        use: what the thing is used for.
    """
    for kind in dict.fromkeys(map(type, things)):
        names = [n for base in kind.__mro__ for n in (base.__name__, f"{base.__module__}.{base.__name__}")]
        for refusal in (one for one in table if one.use == use):
            if any(fnmatch.fnmatchcase(known, pattern) for known in names for pattern in refusal.kinds):
                text = f"{name} must {refusal.must}, got {refusal.got}: {refusal.why}"
                raise refusal.error(text.replace("{}", kind.__name__))


def require_supported(layers: Sequence[Optimizer], model: nn.Module | None) -> None:
    """Raise for what does not hold a whole replica in this process, and for a model of another optimizer.

    Args:
        layers: of :func:`hdet.replicas.optimizers.optimizer_layers`.
        model: what is trained, if it is known.
    """
    refuse("optimizer", layers, OPTIMIZERS)
    refuse("model", [] if model is None else model.modules(), MODELS)
    require_initialized([*parameters_of(layers[-1]), *(() if model is None else model.parameters())])
    if partitioning_layer(layers) is not None:  # what it trains may be parts that it has cut out itself
        return
    held = {id(p) for group in layers[-1].param_groups for p in group["params"]}
    of_model = set() if model is None else {id(p) for p in model.parameters()}
    if of_model and not held & of_model:
        raise ValueError(
            "model must have parameters that the optimizer trains, got a "
            f"{type(model).__name__} that shares none with it: build the optimizer from model.parameters(), "
            "after the model was moved or wrapped"
        )

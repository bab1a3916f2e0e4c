"""Presets: published ways of training, as settings of the one engine.

:func:`paper` returns arguments of :class:`hdet.OneCycleAutoLR`, and each other one those of
:class:`hdet.Ensemble` and :class:`hdet.VirtualEnsemble`. The page ``docs/local-training.md`` has a card for
those with local gradients, with its source and with what differs from it.

>>> import torch, hdet
>>> model = torch.nn.Linear(2, 1)
>>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
>>> ensemble = hdet.VirtualEnsemble(
...     model, optimizer, lambda m, x: m(x).square().mean(), num_replicas=4, **diloco(sync_every=50)
... )
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hdet.checks import require_count
from hdet.explore import LearningRate
from hdet.method.controller import Controller
from hdet.method.merges import MeanMerge, Merge, OuterMerge

__all__ = ["diloco", "four_groups", "local_sgd", "paper", "paper_ensemble"]


def paper(total_steps: int) -> dict[str, Any]:
    """The method of the paper at its own settings (section 4.1), for :class:`hdet.OneCycleAutoLR`.

    The spread is 1/9, and replica r holds multiplier r until the controller starts (Algorithm 1, line 3). The
    controller has sigma 0.1, beta 0.9 and lambda 0.5, and its decay ends at 22 % (figure 3). T is 1000 and
    S_warm 100,000 steps. A shorter run has a share of them: T is a hundredth of its steps, at least 5, and
    S_warm a third. The rest of the paper is ``Adam(presets.four_groups(model))``, and from a checkpoint
    ``hdet.warm_start(model, 0.01, norm="global")``.

    >>> settings = paper(3000)
    >>> settings["model_sync_interval"], settings["auto_lr_warmup_steps"], settings["end"]
    (30, 1000, 0.22)
    """
    told = paper_ensemble(total_steps)
    (controller,) = told["controllers"]
    return {
        "total_steps": total_steps,
        "ensemble_lr_spread_ratio": told["explore"][0].spread,
        "model_sync_interval": told["sync_every"],
        "auto_lr_warmup_steps": controller.start,
        "enable_auto_lr": True,
        "loss_scale": controller.temperature,
        "lr_of_lr": controller.step_size,
        "momentum_of_lr": controller.momentum,
        "end": controller.end,
        "assignment": told["assignment"],
    }


def paper_ensemble(total_steps: int) -> dict[str, Any]:
    """The same for :class:`hdet.VirtualEnsemble` and :class:`hdet.Ensemble`, beside a ``scheduler``.

    >>> paper_ensemble(300_000)["controllers"]
    [Controller(form='paper', start=100000, step_size=0.5, momentum=0.9, temperature=0.1, end=0.22, \
max_correction=100.0)]
    """
    start = min(100_000, -(-require_count("total_steps", total_steps) // 3))
    told = {"step_size": 0.5, "momentum": 0.9, "temperature": 0.1, "end": 0.22}
    return {
        "explore": [LearningRate(1 / 9)],
        "sync_every": min(1000, max(5, total_steps // 100)),
        "total_steps": total_steps,
        "assignment": "paper",
        "controllers": [Controller(form="paper", start=start, **told)],
    }


def four_groups(model: nn.Module, transformer: str = "blocks.") -> list[dict[str, Any]]:
    """Split parameters as the paper's figure 3 does: embedding, no_decay, non_embedding, transformer.

    Tables; biases and norms, which do not decay; matrices outside of the transformer; matrices inside. A
    group that the model does not have is left out.

    Args:
        model: has the parameters.
        transformer: what names of parameters inside begin with.
    """
    names = ("embedding", "no_decay", "non_embedding", "transformer")
    groups: dict[str, dict[str, Any]] = {name: {"name": name, "params": []} for name in names}
    groups["no_decay"]["weight_decay"] = 0.0
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if parameter in tables:
            group = "embedding"
        elif parameter.ndim < 2:
            group = "no_decay"
        else:
            group = "transformer" if name.startswith(transformer) else "non_embedding"
        groups[group]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]]


def local_sgd(*, sync_every: int = 8) -> dict[str, Any]:
    """Local SGD: replicas train alone and take their mean every ``sync_every`` steps.

    Stich 2018, arXiv:1805.09767. The optimizer's moments are averaged with the parameters, as Yu et al. 2019
    (arXiv:1905.03817) do it.

    >>> local_sgd()["merge"]
    MeanMerge()
    """
    return _settings(MeanMerge(), sync_every, "average")


def diloco(*, sync_every: int = 500, lr: float = 0.7, momentum: float = 0.9) -> dict[str, Any]:
    """DiLoCo: the mean change of a round is the gradient of an outer Nesterov optimizer.

    Douillard et al. 2023, arXiv:2311.08105, which trains with AdamW inside. Each replica keeps its moments.

    >>> diloco()["merge"]
    OuterMerge(lr=0.7, momentum=0.9)
    """
    return _settings(OuterMerge(lr=lr, momentum=momentum), sync_every, "keep")


def _settings(merge: Merge, sync_every: int, moments: str) -> dict[str, Any]:
    told = {"gradients": "local", "merge": merge, "sync_every": sync_every, "moments": moments}
    return told | {"explore": [LearningRate(0.0)]}

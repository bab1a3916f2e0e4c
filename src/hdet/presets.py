"""Presets: published ways of training with local gradients, as settings of the one engine.

Each function returns arguments of :class:`hdet.Ensemble` and :class:`hdet.VirtualEnsemble`. The page
``docs/local-training.md`` has a card for each, with its source and with what differs from it.

>>> import torch, hdet
>>> model = torch.nn.Linear(2, 1)
>>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
>>> ensemble = hdet.VirtualEnsemble(
...     model, optimizer, lambda m, x: m(x).square().mean(), num_replicas=4, **diloco(sync_every=50)
... )
"""

from __future__ import annotations

from typing import Any

from hdet.explore import LearningRate
from hdet.method.merges import MeanMerge, Merge, OuterMerge

__all__ = ["diloco", "local_sgd"]


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

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
from hdet.method.controller import Controller
from hdet.method.merges import BestMerge, ElasticMerge, GradientNormMerge, LateMerge, MeanMerge, OuterMerge

__all__ = ["diloco", "easgd", "grawa", "local_sgd", "pbt", "swap"]


def local_sgd(*, sync_every: int = 8) -> dict[str, Any]:
    """Local SGD: replicas train alone and take their mean every ``sync_every`` steps.

    Stich 2018, arXiv:1805.09767. The optimizer's moments are averaged with the parameters, as Yu et al. 2019
    (arXiv:1905.03817) do it.

    >>> local_sgd()["merge"]
    MeanMerge()
    """
    return _settings(MeanMerge(), sync_every) | {"moments": "average"}


def diloco(*, sync_every: int = 500, lr: float = 0.7, momentum: float = 0.9) -> dict[str, Any]:
    """DiLoCo: the mean change of a round is the gradient of an outer Nesterov optimizer.

    Douillard et al. 2023, arXiv:2311.08105, which trains with AdamW inside. Each replica keeps its moments.

    >>> diloco()["merge"]
    OuterMerge(lr=0.7, momentum=0.9)
    """
    return _settings(OuterMerge(lr=lr, momentum=momentum), sync_every) | {"moments": "keep"}


def easgd(*, sync_every: int = 10, strength: float = 0.9) -> dict[str, Any]:
    """Elastic averaging SGD: replicas and a center pull at each other.

    Zhang et al. 2015, arXiv:1412.6651: a period of 10 and a strength (their beta) of 0.9.

    >>> easgd()["merge"]
    ElasticMerge(strength=0.9)
    """
    return _settings(ElasticMerge(strength=strength), sync_every)


def grawa(*, sync_every: int = 16, pull: float = 0.5) -> dict[str, Any]:
    """GRAWA: replicas are pulled to a mean in which small gradients count more.

    Dimlioglu and Choromanska 2024, arXiv:2403.04206. Both defaults are ours.

    >>> grawa()["merge"]
    GradientNormMerge(pull=0.5)
    """
    return _settings(GradientNormMerge(pull=pull), sync_every)


def swap(*, start: float = 0.75, sync_every: int = 1000) -> dict[str, Any]:
    """SWAP: shared gradients at first, then replicas alone, and their mean once at the end.

    Gupta et al. 2020, arXiv:2001.02312. There the first phase ends at a training accuracy, here at a share of
    the run. At a sync replicas are only looked at. Pass ``total_steps`` to the ensemble.

    >>> swap(start=0.8)["merge"]
    LateMerge(start=0.8)
    """
    return _settings(LateMerge(start=start), sync_every)


def pbt(*, sync_every: int = 1000, spread: float = 0.2) -> dict[str, Any]:
    """Population-based training: all take the best replica's weights and learning rate, then vary it again.

    Jaderberg et al. 2017, arXiv:1711.09846, with their factors of 0.8 and 1.2 at the ends of the spread.
    There the worst fifth copies one of the best fifth. Here all copy the best.

    >>> pbt()["merge"], pbt()["controller"].form
    (BestMerge(), 'paper')
    """
    # At this temperature all weight is on the best, and eq. 7 then moves the base to its value.
    takes_the_best = Controller(form="paper", temperature=1e-12, momentum=0.0, step_size=1.0)
    return _settings(BestMerge(), sync_every) | {
        "explore": [LearningRate(spread)],
        "controller": takes_the_best,
        "moments": "average",
    }


def _settings(merge: Any, sync_every: int) -> dict[str, Any]:
    return {
        "gradients": "local",
        "merge": merge,
        "sync_every": sync_every,
        "explore": [LearningRate(0.0)],
    }

"""AutoLR: the recommended recipe under one name, on ranks and in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hdet.core.checks import require_count
from hdet.core.guard import Guard
from hdet.core.recipe import Recipe
from hdet.core.scout import Scout, least_steps
from hdet.ensemble import Ensemble, VirtualEnsemble
from hdet.explore import LearningRate
from hdet.find import FoundLR
from hdet.replicas import ReplicaGroup
from hdet.telemetry import RecordSink

__all__ = ["AutoLR", "VirtualAutoLR", "settings_of"]

_log = logging.getLogger(__name__)

_WARMUP_OF_FOUND = 0.25
"""Between 10 % and 40 %: of ten dev problems of the zoo, six are best with the long warm-up, by 1 to 7 %, and
four with the short one, by up to 1 %."""


def settings_of(recipe: Recipe, optimizer: Optimizer, num_replicas: int) -> dict[str, Any]:
    """The arguments of :class:`hdet.Ensemble` or :class:`hdet.VirtualEnsemble` for this recipe.

    The learning rates that the optimizer has now are the peaks of the schedule. Where a OneCycleLR was there
    before, its peaks are.
    """
    for group in optimizer.param_groups:
        if "max_lr" in group:
            group["initial_lr"] = group.pop("max_lr")
    scout = recipe.scout_for(num_replicas)
    if scout is None and recipe.scout is None:
        _log.warning(
            "the scout is left out: it needs %d steps with %d replicas, and the run has %d. The learning "
            "rate stays near the one that was asked for",
            least_steps(Scout(fraction=recipe.scout_fraction), num_replicas),
            num_replicas,
            recipe.total_steps,
        )
    return {
        "scheduler": LambdaLR(optimizer, recipe.shape),
        "explore": [LearningRate(0.0, per_group=True)],
        "sync_every": recipe.steps_per_round,
        "total_steps": recipe.total_steps,
        "scout": scout,
        "controller": recipe.controller,
        "average_tail": recipe.average_tail,
    }


class AutoLR(Ensemble):
    """Find the learning rate inside the run: two lines in any PyTorch loop.

    Short trials find the learning rate in the first steps, and training starts over with it: a linear warm-up
    and a linear anneal. A controller corrects it on the way, and the weights of the last steps are averaged.
    It is an :class:`hdet.Ensemble` with the settings of :class:`hdet.core.recipe.Recipe`.

    Args:
        optimizer: this replica's optimizer. Its learning rates are where the search starts. They may be wrong
            by a factor of 100.
        total_steps: length of training in optimizer steps.
        model: the model, wrapped in DistributedDataParallel where there are several ranks.
        probe: returns the loss on one held-out batch that is the same on every rank. With it the trials are
            judged better than by their training losses.
        steps_per_epoch: optimizer steps of one pass over the training data; ``math.inf`` if it never repeats,
            None if you do not know.
        found: what :func:`hdet.find_lr` has found before the loop. The run then begins with it at once, and
            neither scouts nor corrects it.
        sync_every: steps between checks of the replicas; None for a good number of them.
        records: takes a record of every round, such as ``hdet.Records("records.jsonl")``.
        replicas: the process group that joins the replicas; None for the world, or for this process alone.
        seed: the same on every replica.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> auto = AutoLR(optimizer, total_steps=1000, model=model)
    >>> for _ in range(500):
    ...     loss = (model(torch.ones(4, 2)) - 1).square().mean()
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    ...     auto.step(loss)
    >>> auto.is_scouting, auto.found_lr["lr"] > 1e-3
    (False, True)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_steps: int,
        model: nn.Module | None = None,
        probe: Callable[[], Tensor | float] | None = None,
        steps_per_epoch: float | None = None,
        found: FoundLR | None = None,
        sync_every: int | None = None,
        records: RecordSink | None = None,
        replicas: dist.ProcessGroup | ReplicaGroup | None = None,
        seed: int = 0,
    ) -> None:
        recipe = Recipe(
            total_steps=total_steps,
            steps_per_epoch=steps_per_epoch,
            sync_every=sync_every,
            scout=None if found is None else False,
            warmup=Recipe.warmup if found is None else _WARMUP_OF_FOUND,
        )
        if found is not None:
            found.write(optimizer)
            if sync_every is None:  # the guard of a short run must look often
                recipe = replace(recipe, sync_every=max(5, min(recipe.steps_per_round, total_steps // 60)))
        group = replicas if isinstance(replicas, ReplicaGroup) else ReplicaGroup.of(replicas)
        settings = settings_of(recipe, optimizer, group.count)
        if found is not None:
            settings["controller"] = Guard(expected_loss=found.expected_loss)
        super().__init__(
            optimizer, model=model, probe=probe, records=records, replicas=group, seed=seed, **settings
        )


class VirtualAutoLR(VirtualEnsemble):
    """:class:`AutoLR` on one device: the replicas are virtual, and all train in this process.

    Args:
        model: what to train; it holds the mean of the replicas after every sync.
        optimizer: ``torch.optim.SGD``, ``Adam`` or ``AdamW``. Its learning rates are where the search starts.
        loss: ``loss(model, batch)``, a scalar tensor.
        total_steps: length of training in optimizer steps.
        num_replicas: how many batches a step has. The scout tries as many learning rates at once.
        probe: ``probe(model)``, the loss on one held-out batch.
        steps_per_epoch: see :class:`AutoLR`.
        sync_every: see :class:`AutoLR`.
        records: see :class:`AutoLR`.
        seed: see :class:`AutoLR`.
        vectorize: see :class:`hdet.VirtualEnsemble`.
        join_equal: see :class:`hdet.VirtualEnsemble`. Turn it off for models with BatchNorm.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[nn.Module, Any], Tensor],
        *,
        total_steps: int,
        num_replicas: int = 8,
        probe: Callable[[nn.Module], Tensor | float] | None = None,
        steps_per_epoch: float | None = None,
        sync_every: int | None = None,
        records: RecordSink | None = None,
        seed: int = 0,
        vectorize: bool = True,
        join_equal: bool = True,
    ) -> None:
        require_count("num_replicas", num_replicas)
        recipe = Recipe(total_steps=total_steps, steps_per_epoch=steps_per_epoch, sync_every=sync_every)
        super().__init__(
            model,
            optimizer,
            loss,
            num_replicas=num_replicas,
            vectorize=vectorize,
            join_equal=join_equal,
            probe=probe,
            records=records,
            seed=seed,
            **settings_of(recipe, optimizer, num_replicas),
        )

"""Several whole runs that become one model or one prediction: model soups and deep ensembles."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.lab.tasks.charlm import CharLM
from hdet.lab.tasks.digits import Digits
from hdet.lab.tasks.feed import Feed
from hdet.lab.tasks.task import Task
from hdet.lab.train.runner import evaluate
from research.peers.base import Diverged, Job, Method, Trained
from research.peers.plain import plain_model

__all__ = ["METHODS", "Mixture", "greedy_soup", "mixture", "uniform_soup"]

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_NUM_MEMBERS = 5


def mixture(task: Task, outputs: Sequence[Tensor], weights: Tensor) -> Tensor:
    r"""Logits of the weighted mean of what models predict, :math:`\log \sum_j a_j p_j`.

    The probabilities of a softmax, of each action by itself for the feed, and plain outputs for any task that
    is not ours.
    """
    stacked, logs = torch.stack(list(outputs)), weights.log()
    logs = logs.reshape(-1, *[1] * (stacked.ndim - 1))
    if isinstance(task, Feed):
        return torch.logsumexp(F.logsigmoid(stacked) + logs, 0) - torch.logsumexp(
            F.logsigmoid(-stacked) + logs, 0
        )
    if isinstance(task, CharLM | Digits):
        return torch.logsumexp(stacked.log_softmax(dim=-1) + logs, dim=0)
    return (stacked * logs.exp()).sum(dim=0)


class Mixture(nn.Module):
    """Models that answer together, with equal weights (Lakshminarayanan et al. 2017)."""

    def __init__(self, task: Task, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self._task, self.models = task, nn.ModuleList(models)
        self.module = models[0]  # a task may ask its model for more than an output

    def forward(self, batch: Any) -> Tensor:
        """The mixture of the predictions."""
        outputs = [model(batch) for model in self.models]
        return mixture(self._task, outputs, torch.full((len(outputs),), 1 / len(outputs)))


def uniform_soup(models: Sequence[nn.Module]) -> nn.Module:
    """The model whose weights are the mean of theirs (Wortsman et al. 2022)."""
    soup = copy.deepcopy(models[0])
    with torch.no_grad():
        for target, *sources in zip(soup.parameters(), *(m.parameters() for m in models), strict=True):
            target.copy_(torch.stack(sources).mean(dim=0))
    return soup


def greedy_soup(models: Sequence[nn.Module], task: Task) -> nn.Module:
    """Add models from the best to the worst, each only if the soup does not get worse by it (algorithm 1).

    Models and soups are scored by their loss on the task's probe, which is not evaluated on.
    """

    def score(model: nn.Module) -> float:
        with torch.no_grad():
            loss = task.loss(model.eval(), task.probe_batch()).item()
        return loss if math.isfinite(loss) else math.inf

    first, *others = sorted(models, key=score)
    chosen, lowest = [first], score(first)
    for model in others:
        tried = score(uniform_soup([*chosen, model]))
        if tried <= lowest:
            chosen, lowest = [*chosen, model], tried
    return uniform_soup(chosen)


def _soup(job: Job, *, is_greedy: bool) -> Trained:
    models = []
    for factor in _FACTORS:
        with suppress(Diverged):
            models.append(plain_model(replace(job, start_lr=factor * job.start_lr)))
    if not models:
        raise Diverged
    return Trained(evaluate(job.task, greedy_soup(models, job.task) if is_greedy else uniform_soup(models)))


def _ensemble(job: Job) -> Trained:
    seeds = [job.seed, *(1000 * (1 + job.seed) + i for i in range(1, _NUM_MEMBERS))]
    members = [plain_model(replace(job, seed=seed)) for seed in seeds]
    return Trained(evaluate(job.task, Mixture(job.task, members)))


METHODS = (
    Method(
        name="soup_uniform",
        description="mean of the weights of five plain runs at x0.25 to x4 of the start LR, from the same "
        "first weights; 10 % warmup, linear anneal",
        run=partial(_soup, is_greedy=False),
        cost=len(_FACTORS),
    ),
    Method(
        name="soup_greedy",
        description="as soup_uniform, with those runs only that lower the soup's loss on the probe",
        run=partial(_soup, is_greedy=True),
        cost=len(_FACTORS),
    ),
    Method(
        name="deep_ensemble",
        description="mean of the predictions of five plain runs at the start LR, from other first weights; "
        "10 % warmup, linear anneal. It takes five times the training and five times the inference",
        run=_ensemble,
        cost=_NUM_MEMBERS,
    ),
)

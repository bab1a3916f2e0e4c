"""Schedules at the learning rate that is given."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

from torch import nn

from hdet.lab.train.runner import evaluate
from hdet.method.recipe import Anneal, Recipe, one_cycle, tail_steps
from hdet.replicas.tail import TailMean
from research.peers.base import Job, Method, Trained, descend

__all__ = ["METHODS", "TAIL_PLAN", "plain_model", "plain_run", "triangular"]

TAIL_PLAN = (
    f"10 % warmup, linear anneal to {100 * Recipe.anneal_to:g} % of the peak, mean of the weights over the "
    f"last {100 * Recipe.average_tail:g} % of the steps"
)


def plain_run(job: Job, **settings: Any) -> Trained:
    """Train as :func:`plain_model` does, and evaluate."""
    return Trained(evaluate(job.task, plain_model(job, **settings)))


def plain_model(
    job: Job,
    *,
    warmup: float = 0.1,
    anneal: Anneal = "linear",
    anneal_to: float = 0.0,
    average_tail: float = 0.0,
) -> nn.Module:
    """Warmup, then the anneal; the mean of the last weights if there is a tail."""
    model = job.build_model()
    optimizer = job.optimizer(model, job.start_lr)
    parameters = job.parameters(model)
    steps, tail, counter = tail_steps(job.steps, average_tail), TailMean(parameters), itertools.count(1)

    def take() -> None:
        step = next(counter)
        if step in steps:
            tail.take(parameters, step)

    shape = partial(one_cycle, total_steps=job.steps, warmup=warmup, anneal=anneal, end=anneal_to)
    descend(job, model, optimizer, job.batches(), job.steps, shape=shape, after_step=take)
    if steps:
        tail.put(parameters)
    return model


def triangular(step: int, *, half_cycle: int, low: float = 0.25) -> float:
    r"""Factor on the highest learning rate of a cyclical one (Smith 2017, "triangular").

    .. math:: c = \lfloor 1 + t/(2s) \rfloor, \qquad x = |t/s - 2c + 1|, \qquad
        f = f_{low} + (1 - f_{low}) \max(0, 1 - x)

    ``half_cycle`` is s. ``low`` is the lowest factor, a quarter as in the paper's advice.

    >>> [triangular(t, half_cycle=2) for t in range(5)]
    [0.25, 0.625, 1.0, 0.625, 0.25]
    """
    cycle = math.floor(1 + step / (2 * half_cycle))
    x = abs(step / half_cycle - 2 * cycle + 1)
    return low + (1 - low) * max(0.0, 1 - x)


def _cyclical(job: Job) -> Trained:
    model = job.build_model()
    shape = partial(triangular, half_cycle=max(1, job.steps // (2 * _NUM_CYCLES)))
    descend(job, model, job.optimizer(model, job.start_lr), job.batches(), job.steps, shape=shape)
    return Trained(evaluate(job.task, model))


_NUM_CYCLES = 4

METHODS = (
    Method(
        name="plain_linear",
        description="the start LR as it is; 10 % warmup, linear anneal",
        run=plain_run,
    ),
    Method(
        name="plain_cosine",
        description="the start LR as it is; 10 % warmup, cosine anneal",
        run=partial(plain_run, anneal="cosine"),
    ),
    Method(
        name="plain_tail",
        description=f"the start LR as it is; {TAIL_PLAN}",
        run=partial(plain_run, anneal_to=Recipe.anneal_to, average_tail=Recipe.average_tail),
    ),
    Method(
        name="cyclical",
        description=f"cyclical LR: {_NUM_CYCLES} triangles from a quarter of the start LR to it and back",
        run=_cyclical,
    ),
)

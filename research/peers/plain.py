"""One cycle at the learning rate that is given."""

from __future__ import annotations

import itertools
from functools import partial

from hdet.ensemble.tail import TailMean
from hdet.lab.train.runner import evaluate
from hdet.method.recipe import Anneal, Recipe, one_cycle, tail_steps
from research.peers.base import Job, Method, Trained, descend

__all__ = ["METHODS", "TAIL_PLAN", "plain_run"]

TAIL_PLAN = (
    f"10 % warmup, linear anneal to {100 * Recipe.anneal_to:g} % of the peak, mean of the weights over the "
    f"last {100 * Recipe.average_tail:g} % of the steps"
)


def plain_run(
    job: Job,
    *,
    warmup: float = 0.1,
    anneal: Anneal = "linear",
    anneal_to: float = 0.0,
    average_tail: float = 0.0,
) -> Trained:
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
    return Trained(evaluate(job.task, model))


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
)

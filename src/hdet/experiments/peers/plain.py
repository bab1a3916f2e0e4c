"""One cycle at the learning rate that is given."""

from __future__ import annotations

from functools import partial

from hdet.core.shape import Anneal, one_cycle
from hdet.experiments.peers.base import Job, Method, Trained, descend
from hdet.experiments.runner import evaluate

__all__ = ["METHODS", "plain_run"]


def plain_run(job: Job, *, anneal: Anneal = "linear") -> Trained:
    """Warmup over a tenth of the steps, then the anneal to zero."""
    model = job.build_model()
    optimizer = job.optimizer(model, job.start_lr)
    shape = partial(one_cycle, total_steps=job.steps, anneal=anneal)
    descend(job, model, optimizer, job.batches(), job.steps, shape=shape)
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
)

"""Replicas that train alone and average now and then: local SGD and DiLoCo."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import SGD

from hdet.lab.train.runner import evaluate
from hdet.method.recipe import one_cycle
from research.peers.base import Diverged, Job, Method, Trained
from research.peers.members import Members

__all__ = ["METHODS", "Outer"]

_SYNC_EVERY = 25


class Outer:
    r"""DiLoCo's outer step (Douillard et al. 2023): Nesterov SGD on the mean displacement of a round.

    .. math:: \Delta = x - \mathrm{mean}_r\, x_r, \qquad b \leftarrow \mu b + \Delta, \qquad
        x \leftarrow x - \eta (\Delta + \mu b)

    Args:
        start: the weights that the first round starts from.
        lr: :math:`\eta`.
        momentum: :math:`\mu`.
    """

    def __init__(self, start: list[Tensor], lr: float = 0.7, momentum: float = 0.9) -> None:
        self.weights = [tensor.detach().clone() for tensor in start]
        self._optimizer = SGD(self.weights, lr=lr, momentum=momentum, nesterov=True)

    @torch.no_grad()
    def step(self, means: list[Tensor]) -> None:
        """Move the weights, given the mean over replicas of what they came to."""
        for weight, mean in zip(self.weights, means, strict=True):
            weight.grad = weight - mean
        self._optimizer.step()


def _train(job: Job, build: Callable[[Members], Callable[[], None]]) -> Trained:
    """All members at one learning rate; ``build`` gives what is done after each averaging."""
    members = Members(job)
    after_average = build(members)
    for step in range(1, job.steps + 1):
        lr = job.start_lr * one_cycle(step - 1, job.steps, anneal="linear")
        if not members.step([lr] * members.count).isfinite().all():
            raise Diverged
        if step % _SYNC_EVERY == 0 or step == job.steps:
            members.rows.average_(range(members.count))
            after_average()
    members.rows.write_template(0)
    return Trained(evaluate(job.task, members.model))


def _local_sgd(job: Job) -> Trained:
    return _train(job, lambda members: lambda: None)


def _diloco(job: Job) -> Trained:
    def build(members: Members) -> Callable[[], None]:
        outer = Outer([matrix[0] for matrix in members.rows.matrices])

        def after_average() -> None:
            outer.step([matrix[0] for matrix in members.rows.matrices])
            for matrix, weight in zip(members.rows.matrices, outer.weights, strict=True):
                matrix.copy_(weight.expand_as(matrix))

        return after_average

    return _train(job, build)


METHODS = (
    Method(
        name="local_sgd",
        description=f"N replicas alone on their batches at the start LR, averaged every {_SYNC_EVERY} steps; "
        "10 % warmup, linear anneal",
        run=_local_sgd,
    ),
    Method(
        name="diloco",
        description=f"as local_sgd, with an outer Nesterov SGD (lr 0.7, momentum 0.9) every {_SYNC_EVERY} "
        "steps; 10 % warmup, linear anneal",
        run=_diloco,
    ),
)

"""Members: N models that train side by side, each on its own stream of batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hdet.replicas.row_optimizers import RowOptimizer
from hdet.replicas.rows import ModelRows
from research.peers.base import Job

__all__ = ["Members"]


class Members:
    """As many members as the job has replicas; together they use the batches that one joined run would.

    Args:
        job: the problem; all members start from the same weights.
    """

    def __init__(self, job: Job) -> None:
        self._task = job.task
        self.model = job.build_model()
        """The template: what is written to it can be evaluated."""
        self._optimizer = job.optimizer(self.model, job.start_lr)
        self.count = job.num_replicas
        self.rows = ModelRows(
            self.model,
            self._optimizer,
            job.task.loss,
            num_replicas=self.count,
            vectorize=job.task.can_vectorize,
        )
        self.row_optimizer = RowOptimizer(self._optimizer)
        self._streams = [job.task.train_batches(seed=job.seed, replica=r) for r in range(self.count)]

    def step(self, lrs: Sequence[float]) -> Tensor:
        """One optimizer step of every member with its learning rate; their losses."""
        batches = [next(stream) for stream in self._streams]
        losses, gradients = self.rows.losses_and_gradients(batches, lambda _: None, self.count)
        self.row_optimizer.step(self.rows.matrices, gradients, lambda _: {"lr": lrs})
        return losses

    def scores(self) -> list[float]:
        """Loss of every member on the task's probe batch; infinite where it is not a number."""
        batch = self._task.probe_batch()
        losses = self.rows.scores(lambda model: self._task.loss(model, batch), lambda _: None, self.count)
        return [loss if math.isfinite(loss) else math.inf for loss in losses]

    @torch.no_grad()
    def copy(self, source: int, target: int) -> None:
        """Give one member the weights, buffers and optimizer state of another."""
        moments = [value for group in self.row_optimizer.moments for value in group.values()]
        for rows in (*self.rows.matrices, *moments, *self.rows.buffers.values()):
            rows[target].copy_(rows[source])

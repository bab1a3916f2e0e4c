"""Members: N models that train side by side, each on its own stream of batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import AdamW

from hdet.virtual.rules import Moments, rule_for
from hdet.virtual.stack import Stack
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
        self._rule = rule_for(self._optimizer)
        self.count = job.num_replicas
        self.stack = Stack(
            self.model,
            self._optimizer,
            job.task.loss,
            num_replicas=self.count,
            vectorize=job.task.can_vectorize,
        )
        self.moments: list[Moments] = [{} for _ in self._optimizer.param_groups]
        self._streams = [job.task.train_batches(seed=job.seed, replica=r) for r in range(self.count)]
        self._num_updates = 0

    def step(self, lrs: Sequence[float]) -> Tensor:
        """One optimizer step of every member with its learning rate; their losses."""
        batches = [next(stream) for stream in self._streams]
        losses, gradients = self.stack.losses_and_gradients(
            batches, is_common=False, before=lambda _: None, num_rows=self.count
        )
        self._num_updates += 1
        with torch.no_grad():
            for i, group in enumerate(self._optimizer.param_groups):
                shared = {
                    key: group[key]
                    for key in ("weight_decay", "momentum", "dampening", "eps")
                    if key in group
                }
                if "betas" in group:
                    shared["beta1"], shared["beta2"] = group["betas"]
                columns = {key: [float(value)] * self.count for key, value in shared.items()}
                hyper = {
                    key: torch.tensor(values, dtype=torch.float64).unsqueeze(1)
                    for key, values in (columns | {"lr": list(lrs)}).items()
                }
                flags = {
                    "has_momentum": bool(group.get("momentum", 0)),
                    "nesterov": group.get("nesterov", False),
                    "is_decoupled": isinstance(self._optimizer, AdamW),
                }
                matrix = self.stack.matrices[i]
                self._rule(matrix, gradients[i], self.moments[i], hyper, self._num_updates, flags)
        return losses

    def scores(self) -> list[float]:
        """Loss of every member on the task's probe batch; infinite where it is not a number."""
        batch = self._task.probe_batch()
        losses = self.stack.scores(lambda model: self._task.loss(model, batch), lambda _: None, self.count)
        return [loss if math.isfinite(loss) else math.inf for loss in losses]

    @torch.no_grad()
    def copy(self, source: int, target: int) -> None:
        """Give one member the weights, buffers and optimizer state of another."""
        moments = [value for group in self.moments for value in group.values()]
        for rows in (*self.stack.matrices, *moments, *self.stack.buffers.values()):
            rows[target].copy_(rows[source])

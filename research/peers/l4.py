"""L4: the step that would reach a fraction of the way to the lowest loss (Rolinek & Martius 2018)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hdet.lab.train.runner import evaluate
from research.peers.base import Diverged, Job, Method, Trained

__all__ = ["L4", "METHODS"]


class L4:
    r"""Scales an update direction v so that the linearised loss falls by a fraction of what is left.

    .. math:: \lambda = \alpha\,\frac{L - \gamma L_{\min}}{g^\top v + \epsilon}, \qquad
        x \leftarrow x - \lambda v

    :math:`L_{\min}` begins at three quarters of the first loss, follows the lowest loss, and grows by a
    thousandth per step, so that an old one is forgotten. g is the running mean of the gradients over ten
    steps. v is g too, or g over the root of the mean square over a thousand steps, as in Adam.

    Args:
        parameters: what is trained.
        is_adam: take the direction of Adam.
        fraction: :math:`\alpha`.
    """

    def __init__(self, parameters: list[nn.Parameter], *, is_adam: bool, fraction: float = 0.15) -> None:
        self._parameters, self._is_adam, self._fraction = parameters, is_adam, fraction
        self._means = [torch.zeros_like(p) for p in parameters]
        self._squares = [torch.zeros_like(p) for p in parameters]
        self._step, self._lowest = 0, math.nan
        self.lr = math.nan
        """The step size of the last step."""

    @torch.no_grad()
    def step(self, loss: float) -> None:
        """Move the parameters, given the loss that their gradients are of."""
        self._step += 1
        self._lowest = 0.75 * loss if self._step == 1 else min(self._lowest, loss)
        gradients, directions = zip(*map(self._direction, range(len(self._parameters))), strict=True)
        slope = sum((g * v).sum().item() for g, v in zip(gradients, directions, strict=True))
        self.lr = self._fraction * (loss - 0.9 * self._lowest) / (slope + 1e-12)
        for parameter, direction in zip(self._parameters, directions, strict=True):
            parameter -= self.lr * direction
        self._lowest *= 1 + 1e-3

    def _direction(self, i: int) -> tuple[Tensor, Tensor]:
        gradient = self._parameters[i].grad
        assert gradient is not None
        self._means[i].lerp_(gradient, 1 / 10)
        mean = self._means[i] / (1 - 0.9**self._step)
        if not self._is_adam:
            return mean, mean
        self._squares[i].lerp_(gradient.square(), 1 / 1000)
        return mean, mean / ((self._squares[i] / (1 - 0.999**self._step)).sqrt() + 1e-4)


def _run(job: Job) -> Trained:
    model, batches = job.build_model(), job.batches()
    parameters = job.parameters(model)
    optimizer = L4(parameters, is_adam=job.optimizer_kind == "adamw")
    for _ in range(job.steps):
        loss = job.task.loss(model, next(batches))
        if not math.isfinite(loss.item()):
            raise Diverged
        model.zero_grad()
        loss.backward()
        job.clip(model)
        optimizer.step(loss.item())
    return Trained(evaluate(job.task, model), optimizer.lr)


METHODS = (
    Method(
        name="l4",
        description="L4Adam or L4Mom with a fraction of 0.15, which needs no LR; no schedule",
        run=_run,
        uses_start=False,
    ),
)

"""DoG: distance over gradients (Ivgi, Hinder and Carmon 2023)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.run.runner import evaluate
from research.peers.base import Job, Method, Trained, descend

__all__ = ["METHODS", "DoG", "average_into"]


class DoG(Optimizer):
    r"""SGD whose step is the distance travelled over the gradients seen.

    .. math:: x_{t+1} = x_t - \eta_t g_t, \qquad
        \eta_t = \frac{\max_{i \le t} \|x_i - x_0\|}{\sqrt{\epsilon + \sum_{i \le t} \|g_i\|^2}}

    where the distance starts at :math:`r_\epsilon = 10^{-6} (1 + \|x_0\|)`. Norms are over all parameters.

    Args:
        params: what to train.
        relative_distance: first distance over 1 + norm of the weights.
        eps: :math:`\epsilon`.
    """

    def __init__(self, params: Iterable[Any], relative_distance: float = 1e-6, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": 1.0})
        self._parameters = [p for group in self.param_groups for p in group["params"]]
        self._initial = [p.detach().clone() for p in self._parameters]
        self._distance = relative_distance * (1 + _norm(self._initial))
        self._sum_squares: Tensor | float = eps
        self.step_size = 0.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step."""
        moved = [p - start for p, start in zip(self._parameters, self._initial, strict=True)]
        self._distance = torch.maximum(self._distance, _norm(moved))
        trained = [p for p in self._parameters if p.grad is not None]
        self._sum_squares = self._sum_squares + _norm([p.grad for p in trained]) ** 2
        step_size = self._distance / self._sum_squares**0.5
        for parameter in trained:
            parameter.sub_(step_size * parameter.grad)
        self.step_size = step_size.item()


def _norm(tensors: list[Any]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


@torch.no_grad()
def average_into(average: nn.Module, model: nn.Module, step: int, gamma: float = 8.0) -> None:
    r"""Polynomial-decay average (Shamir and Zhang 2013), which DoG is meant to be evaluated with.

    .. math:: \bar x_t = (1 - w) \bar x_{t-1} + w x_t, \qquad w = \frac{1 + \gamma}{t + \gamma}
    """
    weight = (1 + gamma) / (step + gamma)
    for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        if mean.is_floating_point():
            mean.lerp_(value, weight)
        else:
            mean.copy_(value)


def _run(job: Job) -> Trained:
    model = job.build_model()
    average = copy.deepcopy(model)
    optimizer = DoG(job.parameters(model))
    num_steps = 0

    def after_step() -> None:
        nonlocal num_steps
        num_steps += 1
        average_into(average, model, num_steps)

    descend(job, model, optimizer, job.batches(), job.steps, after_step=after_step)
    return Trained(evaluate(job.task, average), optimizer.step_size)


METHODS = (
    Method(
        name="dog",
        description="DoG (an SGD for either optimizer), which needs no LR; no schedule, "
        "polynomial-decay average",
        run=_run,
        uses_start=False,
    ),
)

"""Hypergradient descent: the learning rate follows its own gradient (Baydin et al. 2018)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from hdet.lab.train.runner import evaluate
from research.peers.base import Job, Method, Trained, descend

__all__ = ["METHODS", "Hypergradient"]


class Hypergradient(Optimizer):
    r"""Moves one learning rate by the product of this gradient and the last update (paper, eqs. 4-6).

    .. math:: \alpha_t = \alpha_{t-1} + \beta \langle g_t, u_{t-1} \rangle, \qquad
        x_t = x_{t-1} - \alpha_t u_t

    where u is g for SGD, its running sum with momentum, and the normalised first moment for Adam. Nothing
    keeps :math:`\alpha` positive, as in the paper.

    Args:
        base: ``torch.optim.SGD``, ``Adam`` or ``AdamW``, without weight decay.
        rate: :math:`\beta`.
    """

    def __init__(self, base: Optimizer, rate: float) -> None:
        super().__init__(base.param_groups, {})  # the same groups: both see one learning rate
        self._base, self._rate = base, rate
        self._last: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move the learning rate, then the parameters."""
        products = [(p.grad * u).sum().item() for p, u in self._last.items() if p.grad is not None]
        for group in self.param_groups:
            group["lr"] += self._rate * math.fsum(products)
        self._base.step()
        self._last = {
            p: self._update(p, group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        }

    def _update(self, parameter: Any, group: dict[str, Any]) -> Tensor:
        """The update of the step that was just made, from the moments that torch's optimizers keep."""
        state = self._base.state[parameter]
        if isinstance(self._base, SGD):
            return state["momentum_buffer"] if group["momentum"] else parameter.grad.clone()
        beta1, beta2 = group["betas"]
        step = state["step"].item()
        first = state["exp_avg"] / (1 - beta1**step)
        return first / ((state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"])


def _run(job: Job) -> Trained:
    model = job.build_model()
    # The rates of the paper's experiments with a multi-layer network.
    rate = 1e-3 if job.optimizer_kind == "sgd" else 1e-7
    optimizer = Hypergradient(job.optimizer(model, job.start_lr), rate)
    descend(job, model, optimizer, job.batches(), job.steps)
    return Trained(evaluate(job.task, model), optimizer.param_groups[0]["lr"])


METHODS = (
    Method(
        name="hypergradient",
        description="Adam-HD (rate 1e-7) or momentum SGD-HD (rate 1e-3) from the start LR; no schedule",
        run=_run,
    ),
)

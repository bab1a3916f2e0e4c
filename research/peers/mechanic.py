"""Mechanic: a scale for any optimizer's updates, learned online (Cutkosky, Defazio and Mehta 2023)."""

from __future__ import annotations

from functools import partial

import torch
from torch.optim import Optimizer

from hdet.core.shape import one_cycle
from hdet.run.runner import evaluate
from research.peers.base import Job, Method, Trained, descend

__all__ = ["METHODS", "Mechanic"]

_BETAS = (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)


class Mechanic(Optimizer):
    r"""Scales the sum of a base optimizer's updates :math:`u_t` (paper, algorithm 1).

    .. math::
        \Delta_{t+1} &= \Delta_t + u_t, \qquad
        h_t = \langle \Delta_t,\, g_t + \lambda s_t \|g_t\| x_t / \|x_t\| \rangle \\
        m_t &= \max(\beta m_{t-1}, |h_t|), \quad v_t = \beta^2 v_{t-1} + h_t^2, \quad
        r_t = \max(0, \beta r_{t-1} - s_t h_t) \\
        s_{t+1} &= \frac{(s_{init}/n)\, m_t + r_t}{\sqrt{v_t} + \epsilon}, \qquad
        x_{t+1} = x_1 + s_{t+1} \Delta_{t+1}

    for each of the n values of :math:`\beta`; where s stands outside of these it is their sum.

    Args:
        base: the optimizer; its groups and learning rates are this one's.
        scale: :math:`s_{init}`, below the right learning rate over the base's; the authors' default in optax.
        decay: :math:`\lambda`.
        eps: :math:`\epsilon`.
    """

    def __init__(self, base: Optimizer, scale: float = 1e-6, decay: float = 0.01, eps: float = 1e-8) -> None:
        super().__init__(base.param_groups, {})  # the same groups: a schedule reaches the base
        self._base, self._decay, self._eps = base, decay, eps
        self._first_scale = scale / len(_BETAS)
        self._parameters = [p for group in base.param_groups for p in group["params"]]
        self._start = [p.detach().clone() for p in self._parameters]
        self._sums = [torch.zeros_like(p) for p in self._parameters]
        self._betas = torch.tensor(_BETAS, dtype=torch.float64)
        self._scales, self._largest, self._squares, self._reward = torch.zeros(
            4, len(_BETAS), dtype=torch.float64
        )

    @property
    def scale(self) -> float:
        """The factor on the base's learning rate."""
        return self._scales.sum().item()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of the base, and one of its scale."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self._parameters]
        before = [p.clone() for p in self._parameters]
        self._base.step()
        size = _dot(before, before) ** 0.5
        pull = self._decay * self.scale * _dot(gradients, gradients) ** 0.5 / size if size else 0.0
        product = _dot(self._sums, gradients) + pull * _dot(self._sums, before)
        betas = self._betas
        self._largest = torch.clamp(betas * self._largest, min=abs(product))
        self._squares = betas**2 * self._squares + product**2
        self._reward = torch.clamp(betas * self._reward - self._scales * product, min=0.0)
        wealth = self._first_scale * self._largest + self._reward
        self._scales = wealth / (self._squares.sqrt() + self._eps)
        for p, old, start, total in zip(self._parameters, before, self._start, self._sums, strict=True):
            total.add_(p - old)
            p.copy_(start + self.scale * total)


def _dot(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return sum((a.flatten() @ b.flatten()).double() for a, b in zip(left, right, strict=True)).item()  # pyright: ignore[reportAttributeAccessIssue]


def _run(job: Job) -> Trained:
    model = job.build_model()
    optimizer = Mechanic(job.optimizer(model, 1.0))
    shape = partial(one_cycle, total_steps=job.steps, anneal="linear")
    descend(job, model, optimizer, job.batches(), job.steps, shape=shape)
    return Trained(evaluate(job.task, model), optimizer.scale)


METHODS = (
    Method(
        name="mechanic",
        description="Mechanic over AdamW or SGD at lr 1, as its authors advise; 10 % warmup, linear anneal",
        run=_run,
        uses_start=False,
    ),
)

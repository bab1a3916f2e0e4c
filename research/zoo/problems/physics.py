"""Physics-informed networks: the solution of a differential equation, found without data."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from hdet.lab.tasks.task import batch_generator
from hdet.method.fan_out import derived_seed
from research.zoo.problem import Problem

__all__ = ["BurgersPinn"]

_VISCOSITY = 0.01 / math.pi


class BurgersPinn(Problem):
    r"""Burgers' equation, where a sine wave becomes a shock (Raissi, Perdikaris and Karniadakis, 2019).

    .. math:: u_t + u\,u_x = \nu\,u_{xx}, \quad u(0, x) = -\sin(\pi x), \quad u(t, -1) = u(t, 1) = 0

    with :math:`\nu = 0.01/\pi`, for :math:`t` from 0 to 1. The loss is the mean square of the equation's
    residual, plus those of the errors at the start and at the walls. Training points are new in every step.
    Held out is a fixed grid.
    """

    family = "physics-informed"
    split = "dev"
    num_replicas = 1
    num_steps = 1500
    batch_size = 128
    learning_rate = 5e-3
    can_vectorize = False
    loss_unit = "squared residual"

    def build_model(self, seed: int) -> nn.Module:
        """A network with four hidden layers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            sizes = [2, 64, 64, 64, 64]
            layers = [(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
            return nn.Sequential(*itertools.chain.from_iterable(layers), nn.Linear(sizes[-1], 1))

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Adam, as in the paper's own code."""
        return Adam(groups, lr=lr, weight_decay=self.weight_decay)

    def train_batches(self, *, seed: int, replica: int = 0, start: int = 0) -> Iterator[dict[str, Tensor]]:
        """Random points."""
        for step in itertools.count(start):
            yield _random_points(self.batch_size, batch_generator(seed, replica, step))

    def probe_batch(self) -> dict[str, Tensor]:
        """512 random points, the same ones every time."""
        return _random_points(512, torch.Generator().manual_seed(1))

    def evaluation_batches(self) -> Iterable[dict[str, Tensor]]:
        """A grid of 40 times and 100 places."""
        times, places = _axes()
        t, x = torch.meshgrid(times, places, indexing="ij")
        walls = torch.tensor([-1.0, 1.0]).repeat_interleave(len(times))
        return [
            {
                "inside": torch.stack([t.flatten(), x.flatten()], dim=-1),
                "start": torch.stack([torch.zeros_like(places), places], dim=-1),
                "walls": torch.stack([times.repeat(2), walls], dim=-1),
            }
        ]

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Squared residual of the equation, and squared errors at the start and at the walls."""
        is_training = torch.is_grad_enabled()
        with torch.enable_grad():  # the residual needs derivatives in evaluation too
            residual = _residual(model, batch["inside"])
        if not is_training:
            residual = residual.detach()
        start = model(batch["start"]) + torch.sin(math.pi * batch["start"][..., 1:])
        return residual.square().mean() + start.square().mean() + model(batch["walls"]).square().mean()

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Loss, and the relative error of the solution on the grid."""
        solution = _exact_solution()
        with torch.no_grad():
            found = model(next(iter(self.evaluation_batches()))["inside"]).squeeze(-1)
        error = (found - solution).norm() / solution.norm()
        return super().metrics(model, batches) | {"error": error.item()}


def _residual(model: nn.Module, points: Tensor) -> Tensor:
    points = points.detach().requires_grad_()
    u = model(points)
    (gradient,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    u_t, u_x = gradient[..., :1], gradient[..., 1:]
    (second,) = torch.autograd.grad(u_x.sum(), points, create_graph=True)
    return u_t + u * u_x - _VISCOSITY * second[..., 1:]


def _random_points(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Points (t, x), and a quarter as many at the start and at the walls."""
    inside = torch.rand(count, 2, generator=generator)
    start, walls = torch.rand(2, count // 4, 2, generator=generator)
    start[:, 0] = 0
    walls[:, 1] = walls[:, 1].round()
    scale, offset = torch.tensor([1.0, 2.0]), torch.tensor([0.0, -1.0])
    return {
        "inside": inside * scale + offset,
        "start": start * scale + offset,
        "walls": walls * scale + offset,
    }


def _axes() -> tuple[Tensor, Tensor]:
    """Times and places of the grid, in the middle of their cells."""
    return (torch.arange(40) + 0.5) / 40, (torch.arange(100) + 0.5) / 50 - 1


@functools.lru_cache(maxsize=1)
def _exact_solution() -> Tensor:
    """The solution on the grid, by Cole and Hopf's transform and Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite.hermgauss(100)
    times, places = (axis.double().numpy() for axis in _axes())
    y = places[:, None] - np.sqrt(4 * _VISCOSITY * times)[:, None, None] * nodes
    kernel = weights * np.exp(-np.cos(np.pi * y) / (2 * np.pi * _VISCOSITY))
    solution = -(np.sin(np.pi * y) * kernel).sum(axis=-1) / kernel.sum(axis=-1)
    return torch.from_numpy(solution.reshape(-1)).float()

"""The noisy quadratic, where everything can be computed exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from hdet.lab.limits import NotNegative, require_hinted
from hdet.lab.tasks.task import Task, batch_generator


@dataclass(frozen=True, kw_only=True)
class Quadratic(Task):
    r"""A quadratic bowl whose centre is sampled anew in every batch.

    .. math:: L(x) = \frac12 \sum_i h_i\, E (x_i - \xi_i)^2 = \frac12 \sum_i h_i (x_i^2 + s_i^2),
        \qquad \xi_i \sim N(0, s_i^2)

    with curvatures h_i evenly spaced in their logarithm from 1 to 1/condition, starting at x_i = start. After
    Zhang et al. 2019 ("Which algorithmic choices matter at which batch sizes?"): a large learning rate is
    fast and ends on a high noise floor, a small one is slow. :meth:`expected_loss` gives the exact mean loss
    of SGD at any schedule.

    Args:
        size: number of parameters.
        condition: largest curvature over the smallest.
        start: where every x_i begins.
        noise: standard deviation s of the samples.
        batch_size: samples per replica and step.
    """

    size: int = 100
    condition: Annotated[float, {"at_least": 1}] = 100.0
    start: float = 5.0
    noise: NotNegative = 1.0
    batch_size: int = 4

    learning_rate = 0.3
    num_steps = 500

    def __post_init__(self) -> None:
        require_hinted(Quadratic, vars(self))

    @property
    def curvatures(self) -> Tensor:
        """h, from 1 down to 1 / condition."""
        return torch.logspace(0, -math.log10(self.condition), self.size)

    def build_model(self, seed: int) -> nn.Module:
        """The point x; it starts at the same place whatever the seed."""
        return _Point(self.curvatures, self.start)

    def train_batches(self, *, seed: int, replica: int = 0, start: int = 0) -> Iterator[Tensor]:
        """Samples of the centre."""
        for step in itertools.count(start):
            generator = batch_generator(seed, replica, step)
            yield self.noise * torch.randn(self.batch_size, self.size, generator=generator)

    def evaluation_batches(self) -> Iterable[Tensor]:
        """Two samples with the true mean and variance, so that the loss is exact."""
        centre = torch.full((1, self.size), self.noise)
        return [torch.cat([centre, -centre])]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Half the squared distance to each sample, weighted by curvature."""
        return model(batch)

    def expected_loss(self, lrs: Sequence[float], num_replicas: int = 1) -> float:
        """Mean final loss of plain SGD with these learning rates, exactly.

        With a shared gradient over B = batch_size x num_replicas samples, mean and variance of x_i follow
        m <- (1 - lr h) m and v <- (1 - lr h)^2 v + (lr h s)^2 / B.
        """
        h = self.curvatures.double()
        mean, variance = torch.full_like(h, self.start), torch.zeros_like(h)
        noise = self.noise**2 / (self.batch_size * num_replicas)
        for lr in lrs:
            mean = (1 - lr * h) * mean
            variance = (1 - lr * h) ** 2 * variance + (lr * h) ** 2 * noise
        return (0.5 * h * (mean**2 + variance + self.noise**2)).sum().item()


class _Point(nn.Module):
    curvatures: Tensor

    def __init__(self, curvatures: Tensor, start: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((len(curvatures),), float(start)))
        self.register_buffer("curvatures", curvatures)

    def forward(self, samples: Tensor) -> Tensor:
        return 0.5 * (self.curvatures * (self.x - samples).square()).sum(dim=-1).mean()

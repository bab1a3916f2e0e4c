"""A tiny regression problem whose parameters split into four groups, and data that depend on the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Net",
    "batch",
    "linear",
    "loss_of",
    "make_optimizer",
    "mean_square",
    "parameter_groups",
    "train_linear",
    "train_step",
]


class Net(nn.Module):
    """Two layers, four tensors, double precision."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.w1, self.b1 = parameter(5, 3), parameter(5)
        self.w2, self.b2 = parameter(2, 5), parameter(2)

    def forward(self, x: Tensor) -> Tensor:
        """The prediction."""
        return predict(x, self.w1, self.b1, self.w2, self.b2)


def predict(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return torch.tanh(x @ w1.T + b1) @ w2.T + b2


def batch(replica: int, step: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The batch of one replica at one step, of a fixed target function with noise."""
    generator = torch.Generator().manual_seed(1_000_000 * seed + 1000 * step + replica)
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(8, 2, generator=generator, dtype=torch.float64)
    return x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs()], dim=1) + 0.1 * noise


def parameter_groups(model: nn.Module, num_groups: int) -> list[dict]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if num_groups == 1:
        return [{"params": parameters}]
    assert num_groups == len(parameters)
    return [{"params": [p]} for p in parameters]


def make_optimizer(name: str, groups: list[dict]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.1)
    if name == "momentum":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    if name == "adam":
        return torch.optim.Adam(groups, lr=0.1)
    assert name == "adamw"
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)


def loss_of(model: nn.Module, data: Any) -> Tensor:
    """The squared error on a pair of inputs and targets."""
    x, y = data
    return (model(x) - y).square().mean()


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that needs no targets: the outputs are to be zero."""
    return model(x).square().mean()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, replica: int, step: int) -> Tensor:
    """Step the optimizer with the batch of one replica; return its loss."""
    loss = loss_of(model, batch(replica, step))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def linear(lr: float = 0.1, **settings: Any) -> tuple[nn.Linear, torch.optim.AdamW]:
    """A linear model of three inputs, always with the same weights, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, **settings)


def train_linear(model: nn.Module, optimizer: Any, scheduler: Any, num_steps: int) -> list[float]:
    """Train what :func:`linear` made; return the learning rate after each step."""
    rates = []
    for step in range(num_steps):
        loss = mean_square(model, torch.full((4, 3), 1.0 + step % 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def all_equal(a: Any, b: Any) -> bool:
    """Compare states bit by bit; NaN is equal to NaN."""
    if isinstance(a, Tensor):
        return (
            torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) if a.is_floating_point() else torch.equal(a, b)
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(all_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(all_equal, a, b))
    return a == b or (a != a and b != b)

"""A tiny regression problem whose parameters split into four groups, and data that depend on the step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Net", "batch", "make_optimizer", "parameter_groups"]


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

"""Replicas that share a gradient lie on a line."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from hdet.method.fan_out import multipliers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["OPTIMIZERS", "Fanned", "draw", "fan_out", "residual"]

OPTIMIZERS = {
    "SGD": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "Adam": lambda p, lr: torch.optim.Adam(p, lr=0.1 * lr),
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr=0.1 * lr, weight_decay=0.1),
}


class Fanned(NamedTuple):
    """Replicas after a round, each as one long vector."""

    start: Tensor
    ends: Tensor
    """One row for each replica."""
    factors: Tensor
    """The multiplier of each."""


def fan_out(
    optimizer: str,
    *,
    gradients: str = "shared",
    num_replicas: int = 8,
    spread: float = 1 / 9,
    num_steps: int = 50,
    lr: float = 0.05,
    seed: int = 0,
) -> Fanned:
    """Train a small net for one round: each replica with its own learning rate, and its own batches."""
    generator = torch.Generator().manual_seed(seed)
    factors = multipliers(num_replicas, spread)
    models = [_model() for _ in factors]
    for parameter in models[0].parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    start = _flat(models[0])
    optimizers = [
        OPTIMIZERS[optimizer](model.parameters(), lr * factor)
        for model, factor in zip(models, factors, strict=True)
    ]
    for _ in range(num_steps):
        for model in models:
            x = torch.randn(16, 8, generator=generator, dtype=torch.float64)
            model.zero_grad()
            (model(x) - x.sin().sum(dim=1, keepdim=True)).square().mean().backward()
        if gradients == "shared":
            _share_gradients(models)
        for step in optimizers:
            step.step()
    return Fanned(
        start, torch.stack([_flat(model) for model in models]), torch.tensor(factors, dtype=torch.float64)
    )


def residual(fanned: Fanned) -> float:
    r"""How far replicas are from their line, over the displacement of the round; the largest of all replicas.

    .. math:: \max_r \frac{\|\theta_r - \bar\theta - (\rho_r - 1) D\|}{\|D\|},
              \qquad D = \bar\theta - \theta_0
    """
    mean = fanned.ends.mean(dim=0)
    displacement = mean - fanned.start
    expected = mean + (fanned.factors - 1)[:, None] * displacement
    return ((fanned.ends - expected).norm(dim=1).max() / displacement.norm()).item()


def draw(seed: int = 0) -> Figure:
    """Left: replicas seen from above. Right: how far they are from the line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    view, bars = figure.subplots(1, 2, width_ratios=[1.2, 1])
    for gradients, marker in (("local", "^"), ("shared", "o")):
        fanned = fan_out("Adam", gradients=gradients, seed=seed)
        mean = fanned.ends.mean(dim=0)
        along = (mean - fanned.start) / (mean - fanned.start).norm()
        deviation = fanned.ends - mean
        position = deviation @ along
        across = deviation - position[:, None] * along
        # The direction across the line in which local replicas differ most.
        sideways = across @ torch.linalg.svd(across).Vh[0]
        view.plot(position, sideways, marker, label=f"{gradients} gradients", markersize=6)
    view.axhline(0, color="0.7", linewidth=1, zorder=0)
    view.set(
        xlabel="along the step of the round", ylabel="across it", title="Eight replicas after a round (Adam)"
    )
    view.legend()
    values = {name: residual(fan_out(name, seed=seed)) for name in OPTIMIZERS}
    values["Adam, local"] = residual(fan_out("Adam", gradients="local", seed=seed))
    colors = ["C1"] * len(OPTIMIZERS) + ["C0"]
    bars.barh(list(values), [max(value, 1e-17) for value in values.values()], color=colors)
    bars.invert_yaxis()
    bars.set(
        xscale="log", xlim=(1e-17, 10), title="Distance from the line", xlabel="over the step of the round"
    )
    return figure


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def _share_gradients(models: list[nn.Module]) -> None:
    for same in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack([p.grad for p in same if p.grad is not None]).mean(dim=0)
        for parameter in same:
            parameter.grad = mean.clone()

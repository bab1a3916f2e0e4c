"""What a user writes, for type checkers: ``make release`` runs pyright and mypy on it, with the wheel."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import hdet


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def train(model: nn.Module, batches: list[Tensor], folder: Path) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    found: hdet.FoundLR = hdet.find_lr(model, optimizer, batches, loss_of, total_steps=1000)
    learning_rates: list[float] = found.lr
    auto = hdet.AutoLR(optimizer, total_steps=1000, model=model, found=found)
    for batch in batches:
        loss = loss_of(model, batch)
        auto.step(loss)
    saved: Path = hdet.save_checkpoint(folder, step=auto.num_steps, model=model, auto=auto)
    checkpoint: hdet.Checkpoint | None = hdet.load_checkpoint(saved.parent, model=model, auto=auto)
    step: int = 0 if checkpoint is None else checkpoint.step
    return learning_rates[0] + step


def explore(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    ensemble = hdet.Ensemble(
        optimizer,
        model=model,
        explore=[hdet.LearningRate(spread=1 / 9), hdet.WeightDecay(spread=0.5)],
        controllers=[hdet.Controller()],
        records=hdet.Records(),
    )
    ensemble.step(0.5)
    return ensemble.base


def virtual(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    ensemble = hdet.VirtualEnsemble(model, optimizer, loss_of, num_replicas=4, sync_every=10)
    losses: Tensor = ensemble.step(batch)
    return losses


def drop_in(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
    return hdet.OneCycleAutoLR(optimizer, max_lr=1e-3, total_steps=1000)

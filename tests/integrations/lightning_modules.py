"""A small problem for Lightning, and the same run as a plain loop."""

from __future__ import annotations

import random

import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import hdet
from hdet.tuning import searched

NUM_BATCHES, BATCH_SIZE = 30, 16


class Net(lightning.LightningModule):
    """Regression. It logs, keeps what it has seen, and has a metric."""

    def __init__(self, lr: float = 1e-4, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 1))
        self.seen, self.lr = [], lr
        self.mean_loss, self.mean_val_loss = MeanMetric(), MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.mean_loss.update(loss.detach())
        random_state = (torch.get_rng_state().sum().item(), np.random.rand(), random.random())  # noqa: NPY002
        self.seen.append((batch_idx, batch[0].sum().item(), *random_state))
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.logger is not None:
            self.logger.log_metrics({"direct": loss.item()})
        self.log("mean_loss", self.mean_loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.mean_val_loss.update(loss)  # its state is of inference mode from now on
        self.log("val_loss", loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=self.lr)


def data(seed: int = 0, num_batches: int = NUM_BATCHES) -> TensorDataset:
    x = torch.randn(num_batches * BATCH_SIZE, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(dim=1, keepdim=True).sin())


def loader(**arguments) -> DataLoader:
    return DataLoader(data(), batch_size=BATCH_SIZE, **arguments)


def held_out() -> DataLoader:
    return DataLoader(data(seed=1, num_batches=2), batch_size=BATCH_SIZE)


def plain_loop(
    num_epochs: int, *, num_micro_batches: int = 1, clip_norm: float | None = None, lr: float = 1e-4
) -> tuple[hdet.FoundLR, nn.Module]:
    """What Lightning is expected to do."""
    model = Net().net
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    batches = [tuple(batch) for batch in loader()]

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return mse_loss(model(batch[0]), batch[1])

    total_steps = num_epochs * NUM_BATCHES // num_micro_batches
    found = searched(model, optimizer, batches, loss_of, total_steps=total_steps, clip_norm=clip_norm)
    auto = hdet.AutoLR(optimizer, total_steps=total_steps, model=model, found=found)
    for _ in range(num_epochs):
        for i, batch in enumerate(batches):
            loss = loss_of(model, batch)
            (loss / num_micro_batches).backward()
            auto.observe(loss)
            if (i + 1) % num_micro_batches == 0:
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
                optimizer.step()
                optimizer.zero_grad()
                auto.step()
    return found, model

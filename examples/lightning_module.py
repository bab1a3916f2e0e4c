"""A Lightning run that finds its learning rate: one callback, and no scheduler.

    pip install '.[lightning]'
    python examples/lightning_module.py

The task is to recognize which of eight noisy waves a signal is. The learning rate of the module is far too
low.
"""

from __future__ import annotations

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from hdet.integrations.lightning import LearningRateSearch


class Waves(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        signals, kinds = batch
        loss = cross_entropy(self.net(signals), kinds)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        signals, kinds = batch
        self.log("accuracy", (self.net(signals).argmax(dim=1) == kinds).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)  # any guess, and no scheduler


def waves(size: int) -> TensorDataset:
    kinds, phases = torch.randint(8, (size,)), 6.28 * torch.rand(size, 1)
    signals = torch.sin(torch.arange(32) * 0.2 * (1 + kinds[:, None]) + phases)
    return TensorDataset(signals + 0.5 * torch.randn(size, 32), kinds)


def main() -> None:
    lightning.seed_everything(0)
    train, held_out = DataLoader(waves(6400), 64, shuffle=True), DataLoader(waves(1280), 64)
    search = LearningRateSearch()
    trainer = lightning.Trainer(
        max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[search]
    )
    trainer.fit(Waves(), train, held_out)
    print(search.found)
    print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()

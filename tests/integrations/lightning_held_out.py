"""A module that learns wrong labels by heart in Lightning, and the runs that torchrun starts on two ranks."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import hdet
from hdet.integrations.lightning import LearningRateSearch
from tests.integrations import wrong_labels as task
from tests.integrations.launch import leave


class Classifier(lightning.LightningModule):
    """It logs, counts, draws random numbers and has a metric in every training step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = task.net()
        self.mean_loss = MeanMetric()
        self.seen: list[tuple[float, ...]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = task.loss_of(self.net, (x, y))
        self.mean_loss.update(loss.detach())
        drawn = (torch.rand(()).item(), np.random.rand(), random.random())  # noqa: NPY002
        self.seen.append((batch_idx, x.sum().item(), *drawn))
        self.log("mean_loss", self.mean_loss, on_step=False, on_epoch=True)
        if self.logger is not None:
            self.logger.log_metrics({"direct": loss.item()})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=task.LR, weight_decay=task.DECAY)


def train_loader(num_ranks: int, rank: int) -> DataLoader[Any]:
    """Ranks together have the batches of one process."""
    rows = range(rank, task.NUM_ROWS, num_ranks)
    return DataLoader(task.rows(), task.BATCH_SIZE // num_ranks, sampler=rows)


def held_out() -> DataLoader[Any]:
    return DataLoader(task.held_out_rows(), 64)


def exploring(records: hdet.Records | None = None, **changes: Any) -> LearningRateSearch:
    settings: dict[str, Any] = {
        "controllers": [hdet.HeldOutWeightDecay()],
        "probe": held_out(),
        "search": False,
    }
    return LearningRateSearch(records=records, **(settings | changes))


def fit(
    search: LearningRateSearch,
    *callbacks: Callback,
    module: Classifier | None = None,
    ckpt_path: Path | None = None,
    **changes: Any,
) -> Classifier:
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    settings: dict[str, Any] = {
        "max_epochs": task.NUM_EPOCHS,
        "accelerator": "cpu",
        "use_distributed_sampler": False,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(**(settings | changes), callbacks=[search, *callbacks])
    module = Classifier() if module is None else module
    trainer.fit(module, train_loader(trainer.num_devices, trainer.global_rank), ckpt_path=ckpt_path)
    return module


def flat(module: torch.nn.Module) -> list[float]:
    return [value for p in module.parameters() for value in p.flatten().tolist()]


def main(folder: Path) -> None:
    """Train on two ranks, each with its part of the held-out rows, and go on from the middle."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    answers = []
    for name, ckpt_path in (("first", None), ("again", folder / "first/epoch=12.ckpt")):
        records = hdet.Records()
        part = task.batches_of(task.held_out_rows(), 64)[int(os.environ["LOCAL_RANK"]) :: 2]
        search = exploring(records, probe=part)
        module = fit(
            search,
            ModelCheckpoint(folder / name, "{epoch}", save_top_k=-1),
            ckpt_path=ckpt_path,
            devices=2,
            strategy="ddp",
        )
        answers.append(
            {
                "decays": task.decays(records),
                "held_out": [look.held_out_loss for look in task.looks(records)],
                "base": search.auto.base,
                "end": flat(module),
            }
        )
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()

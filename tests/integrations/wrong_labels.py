"""A small table whose labels are often wrong. A model learns them by heart, and more weight decay helps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import hdet

NUM_ROWS, BATCH_SIZE, NUM_EPOCHS = 128, 16, 25
NUM_STEPS = NUM_ROWS // BATCH_SIZE * NUM_EPOCHS
LR, DECAY = 0.01, 0.01


def rows(seed: int = 0, count: int = NUM_ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    is_wrong = torch.rand(count, generator=generator) < 0.3
    return TensorDataset(x, ((x.sum(dim=1) > 0) ^ is_wrong).long())


def held_out_rows() -> TensorDataset:
    return rows(seed=1, count=256)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 2))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def batches_of(data: TensorDataset, size: int = BATCH_SIZE) -> list[tuple[Tensor, Tensor]]:
    x, y = data.tensors
    return list(zip(x.split(size), y.split(size), strict=True))


def plain_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> tuple[nn.Module, hdet.Records]:
    """What a callback is expected to do."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    records = hdet.Records()
    auto = hdet.AutoLR(
        optimizer,
        total_steps=NUM_STEPS,
        model=model,
        controllers=[hdet.HeldOutWeightDecay()],
        probe=hdet.Probe(batches_of(held_out_rows(), 64), loss_of),
        records=records,
    )
    for step in range(NUM_STEPS):
        loss = loss_of(model, batches_of(rows())[step % (NUM_ROWS // BATCH_SIZE)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)
    return model, records


def looks(records: hdet.Records) -> list[Any]:
    """What each look at the probe has seen."""
    return [r.controllers["weight_decay"] for r in records if "weight_decay" in r.controllers]


def decays(records: hdet.Records) -> list[tuple[int, float]]:
    """Steps at which the probe was looked at, and the weight decay of the round before it."""
    return [
        (record.step, record.base["weight_decay"])
        for record in records
        if "weight_decay" in record.controllers
    ]

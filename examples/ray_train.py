"""A training function for Ray Train that finds its learning rate. Its records are reported to Ray.

    pip install 'hdet[ray]'
    python examples/ray_train.py

It runs unchanged on a cluster, with the number of workers that you want. The task is to add eight numbers.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import ray.train
import ray.train.torch
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hdet


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)  # any guess
    loader = ray.train.torch.prepare_data_loader(DataLoader(torch.randn(4096, 8), batch_size=32))
    settings, records = {"total_steps": config["epochs"] * len(loader)}, hdet.Records()
    found = hdet.find_lr(model, optimizer, loader, loss_of, **settings)
    auto = hdet.AutoLR(optimizer, model=model, found=found, records=records, **settings)
    num_reported = 0
    for _ in range(config["epochs"]):
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            auto.step(loss)
        new = [asdict(record) for record in records[num_reported:]]  # the first worker has them
        num_reported = len(records)
        ray.train.report({"lr": auto.found_lr["lr"], "loss": loss.item(), "records": new})


def main() -> None:
    workers = ScalingConfig(num_workers=2)
    result = TorchTrainer(train, train_loop_config={"epochs": 4}, scaling_config=workers).fit()
    print(f"found: {result.metrics['lr']:.3g}, last loss: {result.metrics['loss']:.4f}")
    print(f"rounds of the last epoch: {len(result.metrics['records'])}")


if __name__ == "__main__":
    main()

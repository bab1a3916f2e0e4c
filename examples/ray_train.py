"""A training function for Ray Train that finds its learning rate. Its records are reported to Ray.

    pip install '.[ray]' && python examples/ray_train.py

It runs unchanged on a cluster, with a storage path that all nodes see. The task is to add eight numbers.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hdet


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()


def train(config: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # any guess
    loader = ray.train.torch.prepare_data_loader(DataLoader(torch.randn(4096, 8), batch_size=32))
    settings, records = {"total_steps": config["epochs"] * len(loader)}, hdet.Records()
    found = hdet.find_lr(model, optimizer, loader, loss_of, **settings)
    auto = hdet.AutoLR(optimizer, model=model, found=found, records=records, **settings)
    for _ in range(config["epochs"]):
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            auto.step(loss)
        auto.converge()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "auto": auto.state_dict()}
        metrics = {"lr": auto.found_lr["lr"], "records": [asdict(record) for record in records]}
        with TemporaryDirectory() as folder:  # Ray keeps the metrics that come with a checkpoint
            torch.save(state, f"{folder}/state.pt")
            own = Checkpoint.from_directory(folder) if ray.train.get_context().get_world_rank() == 0 else None
            ray.train.report(metrics, checkpoint=own)


def main() -> None:
    scaling, run = ScalingConfig(num_workers=2), RunConfig(storage_path=str(Path("runs/ray").absolute()))
    settings = {"train_loop_config": {"epochs": 4}, "scaling_config": scaling, "run_config": run}
    metrics = ray.train.torch.TorchTrainer(train, **settings).fit().metrics
    print(f"found: {metrics['lr']:.3g}, rounds: {len(metrics['records'])}")


if __name__ == "__main__":
    main()

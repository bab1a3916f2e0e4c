"""What every installation must be able to do with torch and numpy alone. It prints versions and ``ok``."""

from __future__ import annotations

import tempfile
import warnings

import numpy
import torch

import hdet

STEPS = 60


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Learn the sum of the inputs."""
    return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()


def train(ensemble: hdet.Ensemble, model: torch.nn.Module, batches: list[torch.Tensor], steps: int) -> float:
    """A plain loop. The last loss."""
    for step in range(steps):
        loss = loss_of(model, batches[step % len(batches)])
        ensemble.optimizer.zero_grad()
        loss.backward()
        ensemble.optimizer.step()
        ensemble.step(loss)
    return loss.item()


def main() -> None:
    """Find, train, save, load, and spread over virtual replicas."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batches = [torch.randn(16, 8) for _ in range(20)]

    found = hdet.find_lr(model, optimizer, batches, loss_of, total_steps=STEPS)
    assert found.lr[0] > 1e-4, found
    auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, found=found)
    first = loss_of(model, batches[0]).item()
    train(auto, model, batches, STEPS // 2)
    with tempfile.TemporaryDirectory() as folder:
        parts = {"model": model, "optimizer": optimizer, "auto": auto}
        hdet.save_checkpoint(folder, step=auto.num_steps, **parts)
        assert hdet.load_checkpoint(folder, **parts) is not None
    assert train(auto, model, batches, STEPS // 2) < first
    auto.close()

    virtual = hdet.VirtualEnsemble(model, optimizer, loss_of, num_replicas=4, sync_every=5)
    for batch in batches:
        virtual.step(batch)
    virtual.converge()
    print(f"hdet {hdet.__version__}, torch {torch.__version__}, numpy {numpy.__version__}: ok")


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        main()

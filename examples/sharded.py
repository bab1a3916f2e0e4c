"""Find the learning rate of a model that is sharded over ranks: two replicas of two ranks each.

torchrun --standalone --nproc-per-node 4 examples/sharded.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet

STEPS = 200


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sin().sum(dim=1, keepdim=True)).square().mean()


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)  # any guess
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(32, 8, generator=generator) for _ in range(STEPS)]

    axis = mesh["replicate"]
    found = hdet.find_lr(model, optimizer, batches, loss_of, total_steps=STEPS, replicas=axis)
    auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, found=found, replicas=axis)
    for batch in batches:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)
    if dist.get_rank() == 0:
        print(auto.summary())
        print(f"last training loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

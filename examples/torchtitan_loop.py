"""A loop in the shape of torchtitan's that finds its learning rate: two replicas of two ranks each.

    pip install '.[torchtitan]'
    torchrun --standalone --nproc-per-node 4 examples/torchtitan_loop.py

The task is to add the sines of eight numbers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import ModelWrapper
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division

from hdet.integrations.torchtitan import AutoLRContainer

STEPS, BATCH = 200, 32
ADAMW = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-4})  # any guess


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sin().sum(dim=1, keepdim=True)).square().mean()


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    model = fully_shard(model, mesh=mesh)
    disable_fsdp_gradient_division(model)  # torchtitan adds gradients, and divides losses instead
    model.set_force_sum_reduction_for_comms(True)  # gloo has no other
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(BATCH, 8, generator=generator) for _ in range(STEPS)]

    optimizers = OptimizersContainer(OptimizersContainer.Config(param_groups=[ADAMW]), model_parts=[model])
    lr_schedulers = AutoLRContainer(optimizers, total_steps=STEPS)
    lr_schedulers.find_lr(batches, loss_of)
    for batch in batches:
        optimizers.zero_grad()
        loss = loss_of(model, batch) / dist.get_world_size()  # this rank's share of the mean
        loss.backward()
        lr_schedulers.observe(loss)
        optimizers.step()
        lr_schedulers.step()
    states = {"model": ModelWrapper(model), "optimizer": optimizers, "lr_scheduler": lr_schedulers}
    dcp.save(states, checkpoint_id="runs/torchtitan")  # dcp.load goes on from here, without find_lr
    if dist.get_rank() == 0:
        print(lr_schedulers.auto.summary(), f"\nlast loss: {loss.item() * dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Started by torchrun on 2 x 2 ranks: a loop in the shape of torchtitan's, with torchtitan's own parts."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.testing._internal.distributed.fake_pg  # of the axes that a ParallelDims does not use
import torchtitan.distributed.parallel_dims as parallel_dims
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import ModelWrapper
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.distributed.utils import clip_grad_norm_

import hdet
from hdet.integrations.torchtitan import AutoLRContainer

STEPS, BATCH, ACCUMULATED, RANKS, MAX_NORM = 60, 8, 2, 4, 1.0
SAVED_AT = (23, STEPS - 2)  # within a round, and within the tail


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).double()


def batch_of(rank: int, step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + part)
    return torch.randn(BATCH, 8, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sin().sum(dim=1, keepdim=True)).square().mean()


def joined(step: int, parts: range) -> torch.Tensor:
    """What all ranks see, ordered so that a part of it is what they see in theirs."""
    each = [torch.cat([batch_of(rank, step, part) for part in parts]) for rank in range(RANKS)]
    return torch.stack(each, dim=1).flatten(0, 1)


class Run:
    """torchtitan's Trainer, without a language model."""

    def __init__(self, backend: str, *, searches: bool) -> None:
        dims = parallel_dims.ParallelDims(
            dp_replicate=2, dp_shard=2, cp=1, tp=1, pp=1, ep=1, world_size=RANKS, spmd_backend=backend
        )
        shard = "fsdp" if backend == "partial_dtensor" else "dp_shard"
        self.model = build()
        for layer in (self.model[0], self.model):
            fully_shard(layer, mesh=dims.get_mesh(["dp_replicate", shard]))
            layer.set_force_sum_reduction_for_comms(True)  # gloo has no other
        disable_fsdp_gradient_division(self.model)
        adamw = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-4})
        config = OptimizersContainer.Config(param_groups=[adamw])
        self.optimizers = OptimizersContainer(config, model_parts=[self.model])
        # The Trainer has built its own by the time that ours takes its place.
        LRSchedulersContainer.Config(warmup_steps=5).build(optimizers=self.optimizers, training_steps=STEPS)
        self.records = hdet.Records()
        self.lr_schedulers = AutoLRContainer(
            self.optimizers, total_steps=STEPS, sync_every=7, records=self.records
        )
        if searches:
            batches = [batch_of(dist.get_rank(), step, 0) for step in range(STEPS)]
            self.lr_schedulers.find_lr(batches, loss_of, clip_norm=MAX_NORM)
        self.states = {
            "model": ModelWrapper(self.model),
            "optimizer": self.optimizers,
            "lr_scheduler": self.lr_schedulers,
        }
        self.rates: list[float] = []

    def train_step(self, step: int) -> None:
        self.optimizers.zero_grad()
        (rate,) = self.lr_schedulers.get_metrics().values()
        self.rates.append(rate)
        for part in range(ACCUMULATED):
            x = batch_of(dist.get_rank(), step, part)
            loss = loss_of(self.model, x) * BATCH / (BATCH * ACCUMULATED * RANKS)
            loss.backward()
            self.lr_schedulers.observe(loss)
        clip_grad_norm_(list(self.model.parameters()), MAX_NORM)
        self.optimizers.step()
        self.lr_schedulers.step()

    def train(self, steps: range, folder: Path | None = None) -> list[list[float]]:
        for step in steps:
            self.train_step(step)
            if folder is not None and step + 1 in SAVED_AT:
                dcp.save(self.states, checkpoint_id=folder / str(step + 1))
        return [p.full_tensor().flatten().tolist() for p in self.model.parameters()]


def run(folder: Path) -> dict[str, Any]:
    whole = Run("spmd_types", searches=True)
    assert isinstance(whole.lr_schedulers, Stateful)
    end = whole.train(range(STEPS), folder)
    resumed = []
    for step in SAVED_AT:
        again = Run("partial_dtensor", searches=False)
        dcp.load(again.states, checkpoint_id=folder / str(step))
        resumed.append(again.train(range(step, STEPS)) == end)
    found = whole.lr_schedulers.found
    assert found is not None
    return {
        "found": found.lr,
        "num_replicas": whole.lr_schedulers.auto.replicas.count,
        "rates": whole.rates,
        "end": end,
        "resumed_bit_equal": resumed,
        "losses": [(r.step, r.losses) for r in whole.records],
    }


def main() -> None:
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", hdet.HdetWarning)
    parallel_dims.device_type = "cpu"  # it takes a build for CUDA to mean that there is a GPU
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(run(folder)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a transformer of 50 M parameters, sharded, and see what hdet takes of a rank's memory.

torchrun --standalone --nproc-per-node 4 -m benchmarks.large_model

Two replicas of two ranks each. A search, 50 steps with the guard and the tail, and a table of the memory that
hdet has taken, beside what `hdet plan` says. Minutes on a CPU. `--width 64` makes it small.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet
from benchmarks.memory_meter import MemoryMeter
from hdet.lab.plan import memory_cost

STEPS, VOCABULARY, LENGTH, BATCH = 50, 2048, 8, 4


class Transformer(nn.Module):
    """A small language model."""

    def __init__(self, width: int, num_layers: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every place."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = 0.02 * self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Each token follows from the one before it."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch_of(rank: int, step: int) -> Tensor:
    """Sequences in which every token is three times the one before, from a few starts."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(16, (BATCH, 1), generator=generator)
    powers = torch.tensor([3**i for i in range(LENGTH + 1)])
    return (first * powers) % VOCABULARY


def main() -> None:
    """Search, train, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--out", help="write the table as JSON")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = Transformer(options.width)
    num_parameters = sum(p.numel() for p in model.parameters())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = [batch_of(rank, step) for step in range(STEPS)]
    axis = mesh["replicate"]

    with MemoryMeter() as meter:
        found = hdet.find_lr(model, optimizer, batches, loss_of, total_steps=STEPS, replicas=axis)
        auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, found=found, replicas=axis)
        for step, tokens in enumerate(batches):
            loss = loss_of(model, tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            auto.step(loss)
            if rank == 0 and step % 10 == 9:
                print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)

    if rank == 0:
        print(auto.summary())
        cost = memory_cost(num_parameters, 2, num_shards=count // 2)
        rows = {
            "parameters": (cost.parameters, cost.parameters),
            "search, before the run": (meter.peak_of["search"], cost.search),
            "guard": (meter.peak_of["guard"], cost.guard),
            "tail": (meter.peak_of["tail"], cost.tail),
            "hdet, most at a time": (meter.peak_bytes, cost.peak),
        }
        print(f"{num_parameters:,} parameters, {count} ranks; MB on rank 0, measured and planned")
        for what, (measured, planned) in rows.items():
            print(f"{what:24} {measured / 1e6:8.1f} {planned / 1e6:8.1f}")
        if options.out:
            found_here = {"parameters": num_parameters, "ranks": count, "rows": rows}
            Path(options.out).write_text(json.dumps(found_here, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

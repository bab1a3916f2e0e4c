"""Measure what hdet takes beside the training, in multiples of the parameters: `make memory`.

A whole run of `hdet.find_lr` and `hdet.AutoLR` on gloo ranks, with a checkpoint within the tail. Every tensor
that hdet makes is counted. Writes benchmarks/memory.json and prints a table.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from benchmarks.memory_meter import MemoryMeter
from hdet.lab.plan import memory_cost
from tests.helpers.replicas import end_processes, run_replicas

__all__ = ["measure"]

FILE = Path(__file__).parent / "memory.json"
STEPS = 50


class Model(nn.Module):
    """A little transformer-like stack: wide matrices, and small vectors between them."""

    def __init__(self, num_parameters: int, num_layers: int = 6) -> None:
        super().__init__()
        width = round((num_parameters / num_layers) ** 0.5)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Residual layers."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return x

    @property
    def width(self) -> int:
        """Of the input."""
        return self.layers[0].in_features  # pyright: ignore[reportReturnType]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A regression whose loss falls."""
    return (model(x) - x.roll(1, dims=1)).square().mean()


def run(rank: int, num_parameters: int, optimizer_name: str, dtype: str) -> dict[str, Any]:
    """A whole run in this process, as one replica; what its meter has counted."""
    torch.manual_seed(0)
    net = Model(num_parameters).to(getattr(torch, dtype))
    model: nn.Module = net
    if dist.is_initialized() and dist.get_world_size() > 1:
        model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(net.parameters(), lr=1e-4)
        if optimizer_name == "adamw"
        else torch.optim.SGD(net.parameters(), lr=1e-3)
    )
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(8, net.width, generator=generator).to(getattr(torch, dtype)) for _ in range(STEPS)]
    with MemoryMeter() as meter:
        found = hdet.find_lr(model, optimizer, batches, loss_of, total_steps=STEPS)
    search = dict(meter.peak_of)
    search_peak = meter.peak_bytes
    with meter:
        auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, found=found, sync_every=5)
        for step, batch in enumerate(batches):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            auto.step(loss)
            if step == STEPS - 2:
                auto.converge()
                auto.state_dict()
    return {
        "parameter_bytes": sum(p.numel() * p.element_size() for p in net.parameters()),
        "peak": meter.peak_bytes,
        "peak_while_saving": meter.peak_while_saving,
        "at_peak": dict(meter.at_peak),
        "peak_of_search": search_peak,
        "parts_of_search": search,
        "peak_of": meter.peak_of,
        "num_brakes": auto.controllers.state_dict()["guard"]["num_brakes"],
    }


def measure(
    num_parameters: int,
    num_ranks: int,
    *,
    optimizer: str = "adamw",
    dtype: str = "float32",
) -> dict[str, Any]:
    """The rank that takes most, with bytes as multiples of the parameters."""
    answers = run_replicas(run, num_ranks, num_parameters, optimizer, dtype, timeout_seconds=3600)
    most = max(answers, key=lambda answer: answer["peak"])
    size = most["parameter_bytes"]

    def multiples(parts: dict[str, int]) -> dict[str, float]:
        return {name: round(count / size, 4) for name, count in sorted(parts.items())}

    return {
        "parameters": num_parameters,
        "ranks": num_ranks,
        "optimizer": optimizer,
        "dtype": dtype,
        "parameter_bytes": size,
        "peak_bytes": most["peak"],
        "peak_while_saving_bytes": most["peak_while_saving"],
        "peak": round(most["peak"] / size, 4),
        "at_peak": multiples(most["at_peak"]),
        "peak_of": multiples(most["peak_of"]),
        "peak_of_search": round(most["peak_of_search"] / size, 4),
        "num_brakes": most["num_brakes"],
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", default="1e6,1e7", help="counts, with commas")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks, with commas")
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "sgd"])
    parser.add_argument("--name", default="now", help="of the record in benchmarks/memory.json")
    options = parser.parse_args()
    rows = []
    for num_parameters in map(float, options.parameters.split(",")):
        for num_ranks in map(int, options.ranks.split(",")):
            began = time.monotonic()
            row = measure(round(num_parameters), num_ranks, optimizer=options.optimizer)
            cost = memory_cost(row["parameter_bytes"] // 4, num_ranks)
            row |= {"planned_bytes": cost.peak, "planned_while_saving_bytes": cost.peak_while_saving}
            row["measured_over_planned"] = round(row["peak_bytes"] / cost.peak, 4)
            rows.append(row)
            print(f"{time.monotonic() - began:.0f} s", json.dumps(row), flush=True)
    end_processes()
    records = json.loads(FILE.read_text()) if FILE.exists() else {}
    measured = {(row["parameters"], row["ranks"]) for row in rows}
    earlier = records.get(options.name, {"rows": []})["rows"]
    rows += [row for row in earlier if (row["parameters"], row["ranks"]) not in measured]
    records[options.name] = {
        "command": "python -m benchmarks.memory",
        "torch": torch.__version__,
        "rows": rows,
    }
    FILE.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()

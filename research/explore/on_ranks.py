"""Compare a fan-out of weight decay over two ranks with held-out data at work on equal replicas.

``python -m research.explore.on_ranks``. Each rank trains on its half of every batch. Gradients are shared.
Each rank has all of the probe.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.method.fan_out import derived_seed
from research.explore.experiment import open_ledger, probe_of, rate_of
from research.explore.problem import Problem
from research.explore.problems import PROBLEMS

FAST = "digits_mlp,mnist_mlp,mnist_noisy_mlp,mnist1d_mlp,digits_conv,spambase_mlp_sgd"
METHODS = ("fixed", "equal replicas", "fan-out", "fan-out, bounded", "fan-out, defaults")


def settings_of(method: str, problem: Problem) -> dict[str, Any]:
    """Give the arguments of AutoLR. Replicas that fan out are compared every twentieth of the run."""
    if method == "fixed":
        return {}
    settings: dict[str, Any] = {"probe": probe_of(problem)}
    if method == "equal replicas":
        return settings | {"controllers": [hdet.HeldOutWeightDecay()]}
    settings["explore"] = [hdet.WeightDecay()]
    steps: dict[str, Any] = {"start": problem.num_steps // 5}
    if method != "fan-out, defaults":
        bounds = (problem.default_decay / 4, 1e3) if method == "fan-out, bounded" else None
        settings["explore"] = [hdet.WeightDecay(spread=3.0, scale="log", bounds=bounds)]  # 1/4 to 4 times
        steps |= {"step_size": 1.0, "momentum": 0.5}
    return settings | {"controllers": [hdet.Controller(**steps)], "sync_every": problem.num_steps // 20}


def train(rank: int, name: str, method: str, seed: int, lr: float) -> dict[str, float]:
    """Make one run with the rank's half of every batch."""
    torch.manual_seed(derived_seed(seed, "explore training"))
    problem = PROBLEMS[name]
    model, batches = problem.model(seed), problem.batches(seed)
    optimizer = problem.optimizer_of(model, lr, problem.default_decay)
    ddp, settings = DistributedDataParallel(model), settings_of(method, problem)
    with hdet.AutoLR(optimizer, total_steps=problem.num_steps, model=ddp, **settings) as auto:
        for _ in range(problem.num_steps):
            x, y = next(batches)
            loss = problem.loss(ddp, (x.chunk(2)[rank], y.chunk(2)[rank]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            auto.step(loss)
        found = [value for name, value in auto.base.items() if name.startswith("weight_decay")]
        loss = problem.measured(model, problem.parts().test).loss
    return {"final_loss": loss, "found_decay": found[0] if found else problem.default_decay}


def work(rank: int, folder: str, out: Path, jobs: list[tuple[str, str, int, float]]) -> None:
    """Make all runs, as one of the two ranks."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    store = dist.FileStore(f"{folder}/store", 2)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for job in jobs:
        result = dict(zip(("problem", "method", "seed", "lr"), job, strict=True)) | train(rank, *job)
        if rank == 0:
            with out.open("a") as file:
                file.write(json.dumps(result) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", default=FAST)
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11])
    parser.add_argument("--out", type=Path, default=Path("runs/on_ranks.jsonl"))
    given = parser.parse_args()
    records = open_ledger("research/explore/records").records
    rates = {name: float(f"{rate_of(records, name):.4g}") for name in given.problems.split(",")}
    jobs = [(name, m, seed, rates[name]) for name in rates for seed in given.seeds for m in METHODS]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (folder, given.out, jobs), nprocs=2)

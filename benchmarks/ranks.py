"""Measure what a sync and a step of the tail take on 2, 4 and 8 gloo ranks: `python -m benchmarks.ranks`.

It writes benchmarks/ranks.json and prints the table of docs/scaling.md. Plain steps and steps of the tail
alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks.memory import Model, loss_of
from tests.helpers.replicas import end_processes, run_replicas

__all__ = ["measure"]

FILE = Path(__file__).parent / "ranks.json"
REPEATS = 25
BATCH_SIZE = 32


def _model(num_parameters: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Model(num_parameters))
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-4)


def _train(ddp: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    loss = loss_of(ddp, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def _seconds_of_sync(num_parameters: int, spread: float) -> float:
    """A sync after every step: the median over repeats of what ``step`` takes."""
    ddp, optimizer = _model(num_parameters)
    ensemble = hdet.Ensemble(
        optimizer,
        model=ddp,
        explore=[hdet.LearningRate(spread)],
        sync_every=1,
        records=hdet.Records(),
    )
    batch, seconds = torch.randn(BATCH_SIZE, round((num_parameters / 6) ** 0.5)), []
    for _ in range(REPEATS):
        loss = _train(ddp, optimizer, batch)
        dist.barrier()
        start = time.perf_counter()
        ensemble.step(loss)
        seconds.append(time.perf_counter() - start)
    ensemble.close()
    return statistics.median(seconds)


def _tail_over_plain(num_parameters: int) -> float:
    """A step whose weights go into the mean of the tail over a plain one, each in turn."""
    ours, theirs = _model(num_parameters), _model(num_parameters)
    ensemble = hdet.Ensemble(
        ours[1],
        model=ours[0],
        explore=[hdet.LearningRate(0.0)],
        sync_every=10**6,
        total_steps=10**6,
        average_tail=1 - 1e-9,
        records=hdet.Records(),
    )
    schedule = OneCycleLR(theirs[1], 1e-4, total_steps=10**6)
    batch = torch.randn(BATCH_SIZE, round((num_parameters / 6) ** 0.5))
    tail, plain = [], []
    for repeat in range(4 * REPEATS):
        for seconds, (ddp, optimizer) in ((tail, ours), (plain, theirs))[:: 1 if repeat % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            loss = _train(ddp, optimizer, batch)
            if seconds is tail:
                ensemble.step(loss)
            else:
                schedule.step()
            seconds.append(time.perf_counter() - start)
    ensemble.close()
    return statistics.median(tail) / statistics.median(plain)


def _measure_here(rank: int, num_parameters: int) -> dict[str, float]:
    return {
        "equal_ms": 1000 * _seconds_of_sync(num_parameters, 0.0),
        "spread_ms": 1000 * _seconds_of_sync(num_parameters, 1 / 9),
        "tail_over_plain": _tail_over_plain(num_parameters),
    }


def measure(num_parameters: int, num_ranks: int) -> dict[str, Any]:
    """The median over ranks."""
    rows = run_replicas(_measure_here, num_ranks, num_parameters, timeout_seconds=600)
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {"parameters": num_parameters, "ranks": num_ranks, **medians}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", default="1e6,1e7", help="counts, with commas between")
    parser.add_argument("--ranks", default="2,4,8", help="numbers of ranks, with commas between")
    args = parser.parse_args()
    results = []
    print("| parameters | ranks | sync, equal replicas | sync, spread 1/9 | step of the tail / plain step |")
    print("| --- | --- | --- | --- | --- |")
    for size in args.parameters.split(","):
        for ranks in args.ranks.split(","):
            row = measure(int(float(size)), int(ranks))
            end_processes()
            results.append(row)
            print(
                f"| {row['parameters'] / 1e6:g} M | {row['ranks']} | {row['equal_ms']:.3g} ms "
                f"| {row['spread_ms']:.3g} ms | {row['tail_over_plain']:.3f} |",
                flush=True,
            )
    FILE.write_text(json.dumps(results, indent=1) + "\n")

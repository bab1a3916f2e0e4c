"""Every preset and rule of local training against shared gradients, on a task of the command line.

    python -m research.local_training --task digits --steps 300 --out research/records/local-training.json
    python -m research.local_training --table research/records/local-training.json

Four virtual replicas train with AdamW, a warm-up of 10 % and a linear anneal. All sync every 25 steps,
but for SWAP, which averages once, and shared gradients, which are averaged at every step. Population-based
training finds its own schedule. Each method gets the best of three learning rates, by its mean held-out loss
over the seeds. Runs that are in the file already are not made again.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

import hdet
from hdet import presets
from hdet.lab.tasks.task import load_task
from hdet.lab.train.runner import evaluate
from hdet.method.recipe import one_cycle
from research import merges

NUM_REPLICAS, SYNC_EVERY = 4, 25
FACTORS = (1 / 3, 1.0, 3.0)
SHARED: dict[str, Any] = {
    "gradients": "shared",
    "explore": [hdet.LearningRate(0.0)],
    "sync_every": SYNC_EVERY,
}
SWAP_FROM = 0.75
"""Share of a run after which replicas train alone with SWAP."""
METHODS: dict[str, dict[str, Any]] = {
    "shared gradients": SHARED,
    "one replica alone": SHARED,
    "local_sgd": presets.local_sgd(sync_every=SYNC_EVERY),
    "local_sgd, weighted by loss": merges.loss_weighted(sync_every=SYNC_EVERY),
    "diloco": presets.diloco(sync_every=SYNC_EVERY),
    "easgd": merges.easgd(sync_every=SYNC_EVERY),
    "grawa": {},  # it scores replicas on batches of the task
    "swap": SHARED,
    "pbt": merges.pbt(sync_every=SYNC_EVERY),
}


def train(task_name: str, method: str, lr: float, steps: int, seed: int) -> float:
    """The held-out loss at the end of one run; infinite where it failed."""
    task = load_task(task_name, {})
    model = task.build_model(seed)
    optimizer = torch.optim.AdamW(task.parameter_groups(model), lr=lr, weight_decay=0.0)
    count = 1 if method == "one replica alone" else NUM_REPLICAS
    schedule = None  # population-based training finds its own
    if method != "pbt":
        schedule = LambdaLR(optimizer, lambda step: one_cycle(step, steps))
    settings = METHODS[method]
    if method == "grawa":
        batches = [next(task.train_batches(seed=seed, replica=count))]  # no replica trains on them
        settings = merges.grawa(batches, task.loss, sync_every=SYNC_EVERY)

    def build(**settings: Any) -> hdet.VirtualEnsemble:
        return hdet.VirtualEnsemble(
            model,
            optimizer,
            task.loss,
            num_replicas=count,
            vectorize=task.can_vectorize,
            join_equal=True,
            scheduler=schedule,
            total_steps=steps,
            seed=seed,
            **settings,
        )

    ensemble = build(**settings)
    streams = [task.train_batches(seed=seed, replica=r) for r in range(count)]
    try:
        for step in range(steps):
            if method == "swap" and step == round(SWAP_FROM * steps):
                ensemble = merges.resumed(ensemble, lambda: build(**merges.swap(sync_every=SYNC_EVERY)))
            ensemble.step(batches=[next(stream) for stream in streams])
    except hdet.NotFiniteError:
        return math.inf
    return evaluate(task, model)["loss"]


def run(options: argparse.Namespace) -> None:
    """Make all runs that are missing."""
    record: dict[str, Any] = {
        "command": f"python -m research.local_training --task {options.task} --lr {options.lr:g} "
        f"--steps {options.steps} --seeds {options.seeds} --out {options.out}",
        "task": options.task,
        "steps": options.steps,
        "num_replicas": NUM_REPLICAS,
        "sync_every": SYNC_EVERY,
        "torch": torch.__version__,
        "runs": [],
    }
    if options.out.exists():
        record["runs"] = json.loads(options.out.read_text())["runs"]
    done = {(one["method"], one["lr"], one["seed"]) for one in record["runs"]}
    for seed in range(options.seeds):
        for method in METHODS:
            for factor in FACTORS:
                lr = round(options.lr * factor, 8)
                if (method, lr, seed) not in done:
                    loss = train(options.task, method, lr, options.steps, seed)
                    record["runs"].append({"method": method, "lr": lr, "seed": seed, "loss": loss})
                    options.out.parent.mkdir(parents=True, exist_ok=True)
                    options.out.write_text(json.dumps(record, indent=1) + "\n")
                    print(f"seed {seed}  {method:28} lr {lr:g}: {loss:.4f}", flush=True)


def table(path: Path) -> str:
    """Markdown: each method at its best learning rate."""
    runs = json.loads(path.read_text())["runs"]
    lines = [
        "| method | best learning rate | held-out loss | lowest and highest seed |",
        "| --- | ---: | ---: | --- |",
    ]
    for method in METHODS:
        by_lr: dict[float, list[float]] = {}
        for one in runs:
            if one["method"] == method:
                by_lr.setdefault(one["lr"], []).append(one["loss"])
        if by_lr:
            lr = min(by_lr, key=lambda lr: fmean(by_lr[lr]))
            losses = by_lr[lr]
            lines.append(
                f"| {method} | {lr:g} | {fmean(losses):.4f} | {min(losses):.4f} to {max(losses):.4f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Run, or print the table of a record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="digits")
    parser.add_argument("--lr", type=float, default=3e-3, help="the middle of three learning rates")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/local-training.json"))
    parser.add_argument("--table", type=Path, default=None)
    options = parser.parse_args()
    if options.table is None:
        run(options)
    print(table(options.table or options.out))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""Run directories to report on: records of a real small run, and the parts that other code writes."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hdet
from hdet.replicas.rows import join
from tests.helpers.models import Net, batch

__all__ = ["real_records", "write_run"]


_Found = tuple[tuple[hdet.RoundRecord, ...], tuple[dict[str, Any], ...]]


def real_records(
    controller: str = "log", num_replicas: int = 4, steps: int = 300, lr: float = 0.01, seed: int = 0
) -> _Found:
    """Records and evaluations of a real run: three parameter groups, weight decay, and a probe.

    Before a run with the guard, a search finds the learning rate. Its targets are wrong for some steps from
    150 on, so that the guard goes back.
    """
    return _train(controller, num_replicas, steps, lr, seed)


@functools.cache
def _train(controller: str, num_replicas: int, steps: int, lr: float, seed: int) -> _Found:
    model = Net(seed)
    groups = [
        {"params": [model.w1], "name": "embedding"},
        {"params": [model.w2], "name": "head"},
        {"params": [model.b1, model.b2], "name": "bias", "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=0.05)
    controllers = {
        "none": [],
        "log": [hdet.Controller(form="log")],
        "paper": [hdet.Controller(form="paper", end=0.38, start=60, step_size=0.2)],
        "guard": [hdet.Guard()],
    }
    is_guarded = controller == "guard"

    def loss(module: nn.Module, data: tuple[Tensor, ...]) -> Tensor:
        x, y = data
        return (module(x) - y).square().mean()

    held_out = tuple(torch.cat(parts) for parts in zip(*(batch(99, i) for i in range(16)), strict=True))
    probe = hdet.Probe([batch(98, i) for i in range(8)], loss)
    records = hdet.Records()
    if is_guarded:
        batches = [join([batch(r, step, seed + 1) for r in range(num_replicas)]) for step in range(100)]
        found = hdet.find_lr(model, optimizer, batches, loss, total_steps=steps, probe=probe)
        found.write(optimizer)
        records.write(found.to_record(num_replicas))
    peaks = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peaks, total_steps=steps)
    spreads = (0.0, 0.0) if is_guarded else (0.4, 0.5)
    ensemble = hdet.VirtualEnsemble(
        model,
        optimizer,
        loss,
        num_replicas=num_replicas,
        sync_every=5,
        scheduler=scheduler,
        explore=[hdet.LearningRate(spread=spreads[0]), hdet.WeightDecay(spread=spreads[1])],
        controllers=controllers[controller],
        probe=probe,
        records=records,
        seed=seed,
        total_steps=steps,
    )
    evaluations = []
    for step in range(steps + 1):
        if step % 20 == 0:
            with torch.no_grad():
                value = float(loss(model, held_out))
                error = (model(held_out[0]) - held_out[1]).abs().mean()
            evaluations.append(
                {
                    "step": step,
                    "train_loss": None if step == 0 else value * 0.98,
                    "loss": value,
                    "metrics": {"mean error": float(error), "explained variance": 1 - value / 1.7},
                    "seconds": 0.01 * step,
                }
            )
        if step < steps:
            shift = 9.0 if is_guarded and 150 <= step < 160 else 0.0
            data = [batch(r, step, seed) for r in range(num_replicas)]
            ensemble.step(batches=[(x, y + shift) for x, y in data])
    return tuple(records), tuple(evaluations)


def write_run(
    path: Path,
    *,
    name: str | None = None,
    controllers: tuple[str, ...] = ("log",),
    num_replicas: int = 4,
    lr: float = 0.01,
    seed: int = 0,
    is_finished: bool = True,
    excludes: bool = False,
    num_records: int | None = None,
    **config: Any,
) -> Path:
    """Write the directory of a run and return it.

    Args:
        path: of the directory.
        name: of the run.
        controllers: none, or the one of :func:`real_records`.
        num_replicas: how many.
        lr: planned peak.
        seed: of weights and data.
        is_finished: whether there is a result.
        excludes: some replicas were left out.
        num_records: the run has come only so far; None for all of it.
        **config: further settings.
    """
    controller = ",".join(controllers) or "none"
    found, evaluations = real_records(controller, num_replicas, 300, lr, seed)
    records = [replace(record) for record in found[:num_records]]
    if num_records is not None:
        reached = records[-1].step if records else 0
        evaluations = tuple(e for e in evaluations if e["step"] <= reached)
    if excludes:
        for i, replica, why in (
            (7, 2, "parameters are not finite"),
            (8, 2, "parameters are not finite"),
            (31, 0, "loss is an outlier"),
        ):
            records[i] = replace(records[i], excluded={replica: why})
        records[20] = replace(records[20], num_nonfinite_losses=[0, 3, *[0] * (num_replicas - 2)])
    path.mkdir(parents=True, exist_ok=True)
    settings = {
        "name": name or f"feed, {controller} controller",
        "task": "feed", "lr": lr, "steps": 300, "replicas": num_replicas, "engine": "virtual",
        "optimizer": "adamw", "spread": 0.4, "sync_every": 5, "controllers": controllers,
        "find": controller == "guard",
        "explore": ["lr", "weight_decay"], "seed": seed, "loss_unit": "squared error",
    }  # fmt: skip
    environment = {
        "hdet": hdet.__version__, "python": "3.11.9", "torch": torch.__version__, "platform": "Linux x86_64",
        "command": f"hdet run feed --replicas {num_replicas} --lr {lr}",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(settings | config))
    (path / "environment.json").write_text(json.dumps(environment))
    (path / "records.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    (path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
    if is_finished:
        last = evaluations[-1]
        result = {
            "final_loss": last["loss"], "metrics": last["metrics"], "base_lr": lr, "steps": 300,
            "seconds": 41.3, "run_dir": str(path), "status": "finished",
        }  # fmt: skip
        (path / "result.json").write_text(json.dumps(result))
    return path

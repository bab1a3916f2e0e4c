"""Run directories to report on: records of a real small run, and the parts that other code writes."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hdet
from tests.helpers.models import Net, batch

__all__ = ["finder", "real_records", "write_run"]


_Found = tuple[tuple[hdet.RoundRecord, ...], tuple[dict[str, Any], ...]]


def real_records(
    controller: str = "log", num_replicas: int = 4, steps: int = 300, lr: float = 0.01, seed: int = 0
) -> _Found:
    """Records and evaluations of a real run: three parameter groups, weight decay, and a probe."""
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
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps)
    settings: dict[str, Any] = {"log": {}, "paper": {"decay": 0.02, "start": 60, "step_size": 0.2}}

    def loss(module: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        x, y = data
        return (module(x) - y).square().mean()

    held_out = tuple(torch.cat(parts) for parts in zip(*(batch(99, i) for i in range(16)), strict=True))
    probed = tuple(torch.cat(parts) for parts in zip(*(batch(98, i) for i in range(8)), strict=True))
    records = hdet.Records()
    ensemble = hdet.VirtualEnsemble(
        model,
        optimizer,
        loss,
        num_replicas=num_replicas,
        sync_every=5,
        scheduler=scheduler,
        explore=[hdet.LearningRate(spread=0.4), hdet.WeightDecay(spread=0.5)],
        controller=None if controller == "none" else hdet.Controller(form=controller, **settings[controller]),
        probe=lambda module: loss(module, probed),
        records=records,
        seed=seed,
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
            ensemble.step([batch(r, step, seed) for r in range(num_replicas)])
    return tuple(records), tuple(evaluations)


def finder() -> dict[str, Any]:
    """What a scout of two rounds and an anchored controller leave behind."""
    first = [10 ** (-6 + 0.4 * i) for i in range(8)]
    second = [10 ** (-4.2 + 0.4 * i) for i in range(8)]

    def valley(lr: float) -> float | None:
        away = math.log(lr) - math.log(4e-3)
        return None if lr > 0.03 else 0.42 + 0.011 * away**2 * (1.6 if away > 0 else 1)

    steps = [round(4 * 1.06**j) for j in range(75)]
    factors = [math.log(1.2) - math.log(30) * math.exp(-s / 30) + 0.06 * math.sin(s / 25) for s in steps]
    return {
        "scout": {
            "rounds": [
                {"lrs": first, "losses": [valley(lr) for lr in first], "chosen": first[-1], "at_edge": True},
                {"lrs": second, "losses": [valley(lr) for lr in second], "chosen": 4e-3, "at_edge": False},
            ],
            "curve": {"center_log_lr": math.log(4e-3), "curvature": 0.012, "minimum": 0.42},
            "chosen_lr": 5.1e-3,
            "low": 3.6e-3,
            "high": 7.1e-3,
            "reason": "The best of the first round lay at its edge, so the range was shifted once.",
        },
        "anchored": {
            "step": steps,
            "log_factors": {"lr": factors},
            "z": {"lr": [math.cos(s / 9) * math.exp(-s / 120) for s in steps]},
            "gate": {"step": 240, "reason": "the data began to repeat"},
        },
    }


def write_run(
    path: Path,
    *,
    name: str = "feed, log controller",
    controller: str = "log",
    num_replicas: int = 4,
    lr: float = 0.01,
    seed: int = 0,
    is_finished: bool = True,
    has_finder: bool = False,
    excludes: bool = False,
    **config: Any,
) -> Path:
    """Write the directory of a run and return it."""
    found, evaluations = real_records(controller, num_replicas, 300, lr, seed)
    records = [replace(record) for record in found]
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
        "name": name, "task": "feed", "lr": lr, "steps": 300, "replicas": num_replicas, "engine": "virtual",
        "optimizer": "adamw", "spread": 0.4, "sync_every": 5, "controller": controller,
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
    if has_finder:
        (path / "finder.json").write_text(json.dumps(finder()))
    if is_finished:
        last = evaluations[-1]
        result = {
            "final_loss": last["loss"], "metrics": last["metrics"], "base_lr": lr, "steps": 300,
            "seconds": 41.3, "run_dir": str(path), "status": "finished",
        }  # fmt: skip
        (path / "result.json").write_text(json.dumps(result))
    return path

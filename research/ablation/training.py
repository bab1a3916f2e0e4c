"""One run of the ablation: train it, judge it, and keep its curves."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hdet.errors import AllReplicasFailedError
from hdet.lab.train.runner import evaluate
from hdet.lab.train.trainers import Trainer
from hdet.method.fan_out import derived_seed
from hdet.method.recipe import one_cycle
from hdet.round_record import is_learning_rate
from research.ablation.rows import decay_shape
from research.ablation.rules import judge
from research.compare.ledger import Record, task_of
from research.peers.base import Diverged, Job, descend

__all__ = ["CURVE_POINTS", "job_of", "train"]

CURVE_POINTS = 100
_WARMUP = 0.1


def train(spec: Record) -> Record:
    """Run one; a run with replicas if it has settings of RunConfig, else a plain one."""
    job = job_of(spec)
    settings = spec["settings"]
    losses: list[float] = []
    lrs: dict[int, dict[str, float]] = {}
    untrained = evaluate(job.task, job.build_model())["loss"]
    start = time.monotonic()
    # One attention kernel for all rows: replicas that run at once have no other, and at a learning rate that
    # makes logits huge it stays finite where others do not.
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(derived_seed(job.seed, "training"))
        try:
            if "spread" in settings:
                model = _train_replicas(job, settings, losses, lrs)
            else:
                model = _train_plain(job, settings, losses)
            final = evaluate(job.task, model)["loss"]
        except (Diverged, AllReplicasFailedError):
            final = math.nan
    stability = judge(
        losses,
        num_warmup_steps=round(_WARMUP * job.steps),
        final_loss=final,
        untrained_loss=untrained,
    )
    return spec | {
        "final_loss": final if math.isfinite(final) else None,
        "untrained_loss": untrained,
        "crashed": bool(stability.crash),
        "crash": stability.crash,
        "has_spike": stability.has_spike,
        "seconds": time.monotonic() - start,
        "num_steps_done": len(losses),
        "train_losses": thinned(losses),
        "lrs": _thinned_lrs(lrs),
    }


def job_of(spec: Record) -> Job:
    """The problem and the budget that a spec states."""
    return Job(
        task=task_of(spec),
        start_lr=spec["lr"],
        steps=spec["steps"],
        seed=spec["seed"],
        num_replicas=spec["replicas"],
        optimizer_kind=spec["optimizer"],
    )


def _train_plain(job: Job, settings: Mapping[str, Any], losses: list[float]) -> nn.Module:
    model = job.build_model()
    average, after_step = _averaged(job, settings, model, losses)
    shape = partial(decay_shape, steps=job.steps)
    if settings.get("shape") != "decay":
        shape = partial(one_cycle, total_steps=job.steps, warmup=_WARMUP)
    optimizer = job.optimizer(model, job.start_lr)
    descend(
        job,
        model,
        optimizer,
        job.batches(),
        job.steps,
        shape=shape,
        after_step=after_step,
        on_loss=losses.append,
    )
    return model if average is None else average.module


def _averaged(job: Job, settings: Mapping[str, Any], model: nn.Module, losses: list[float]) -> Any:
    """The averaged model, and what adds to it after every step."""
    if settings.get("average") == "ema":
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings["decay"]))
        return average, lambda: average.update_parameters(model)
    if settings.get("average") == "swa":
        average = AveragedModel(model)
        first = round((1 - settings["share"]) * job.steps)
        return average, lambda: average.update_parameters(model) if len(losses) > first else None
    return None, lambda: None


def _train_replicas(
    job: Job, settings: Mapping[str, Any], losses: list[float], lrs: dict[int, dict[str, float]]
) -> nn.Module:
    config = job.config(warmup=_WARMUP, **{"find": False, **settings})
    trainer = Trainer(job.task, config, None, "cpu", searches=False)
    engine = trainer.engine
    while engine.num_steps < job.steps:
        base = {name: float(value) for name, value in engine.base.items() if is_learning_rate(name)}
        seen = trainer.step()
        finite = seen[seen.isfinite()]  # the engine leaves out a replica that is lost
        losses.append(finite.mean().item() if len(finite) else math.nan)
        lrs[engine.num_steps] = base
        if not len(finite):
            raise Diverged
    trainer.converge()
    return trainer.model


def thinned(values: Sequence[float], most: int = CURVE_POINTS) -> list[list[float | None]]:
    """Steps and the mean of the losses up to them since the point before; None where it is not finite.

    >>> thinned([1.0, 3.0, 5.0], 2)
    [[2, 2.0], [3, 5.0]]
    """
    block = max(1, -(-len(values) // most))
    points: list[list[float | None]] = []
    for start in range(0, len(values), block):
        part = values[start : start + block]
        mean = math.fsum(part) / len(part) if all(map(math.isfinite, part)) else math.nan
        points.append([start + len(part), float(f"{mean:.5g}") if math.isfinite(mean) else None])
    return points


def _thinned_lrs(lrs: Mapping[int, Mapping[str, float]]) -> dict[str, list[list[float]]]:
    """By hyperparameter: steps and the shared learning rate at them."""
    steps = sorted(lrs)
    chosen = steps[:: max(1, -(-len(steps) // CURVE_POINTS))]
    names = lrs[chosen[0]] if chosen else {}
    return {name: [[step, float(f"{lrs[step][name]:.5g}")] for step in chosen] for name in names}

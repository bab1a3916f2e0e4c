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

from hdet.lab.ablation import WARMUP, Training, decay_shape
from hdet.lab.ablation import train as train_replicas
from hdet.lab.train.runner import evaluate
from hdet.method.fan_out import derived_seed
from hdet.method.recipe import one_cycle
from research.ablation.rules import judge
from research.compare.ledger import Record, task_of
from research.peers.base import Diverged, Job, descend

__all__ = ["job_of", "train"]

_CURVE_POINTS = 100
_BASE = ("task", "task_options", "lr", "steps", "replicas", "optimizer", "seed")


def train(spec: Record) -> Record:
    """Run one; a run with replicas if it has settings of RunConfig, else a plain one."""
    job, settings = job_of(spec), spec["settings"]
    if "spread" in settings:
        done = train_replicas(job.task, {name: spec[name] for name in _BASE}, settings)
    else:
        done = _train_plain(job, settings)
    stability = judge(
        done.losses,
        num_warmup_steps=round(WARMUP * job.steps),
        final_loss=done.final_loss,
        untrained_loss=done.untrained_loss,
        first_loss=done.untrained_loss if "checkpoint" in settings else None,
    )
    return spec | {
        "final_loss": done.final_loss if math.isfinite(done.final_loss) else None,
        "untrained_loss": done.untrained_loss,
        "crashed": bool(stability.crash),
        "crash": stability.crash,
        "has_spike": stability.has_spike,
        "metrics": done.metrics,
        "seconds": done.seconds,
        "num_steps_done": len(done.losses),
        "train_losses": thinned(done.losses),
        "lrs": done.lrs,
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


def _train_plain(job: Job, settings: Mapping[str, Any]) -> Training:
    start = time.monotonic()
    model = job.build_model()
    untrained, losses = evaluate(job.task, model)["loss"], list[float]()
    final: dict[str, float] = {}
    average, after_step = _averaged(job, settings, model, losses)
    if "decay_to" in settings:
        shape = partial(decay_shape, steps=job.steps, end=settings["decay_to"])
    else:
        shape = partial(one_cycle, total_steps=job.steps, warmup=WARMUP)
    optimizer = job.optimizer(model, job.start_lr)
    # The attention kernel that replicas have; see hdet.lab.ablation.train.
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(derived_seed(job.seed, "training"))
        try:
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
            final = evaluate(job.task, model if average is None else average.module)
        except Diverged:
            pass
    metrics = {name: final[name] for name in job.task.metric_notes if name in final}
    seconds = time.monotonic() - start
    return Training(final.get("loss", math.nan), untrained, losses, {}, seconds, metrics)


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


def thinned(values: Sequence[float], most: int = _CURVE_POINTS) -> list[list[float | None]]:
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

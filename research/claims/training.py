"""One run of a study: train it, and keep what the replicas' losses said."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

import hdet
from hdet.lab.tasks.task import Task
from hdet.lab.train.config import RunConfig
from hdet.lab.train.runner import evaluate
from hdet.lab.train.trainers import Trainer, build_optimizer
from hdet.method.fan_out import derived_seed
from hdet.method.recipe import one_cycle
from hdet.records import RoundRecord
from research.ablation.training import job_of
from research.compare.ledger import Record

__all__ = ["slopes", "train"]


def train(spec: Record) -> Record:
    """Train, evaluate, and sum up the rounds."""
    job = job_of(spec | {"optimizer": "adamw"})
    settings = dict(spec["settings"])
    prior_seeds, groups_alike = settings.pop("prior_seeds", None), settings.pop("groups_alike", False)
    config = job.config(**{"find": False, **settings})
    start = time.monotonic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(job.seed, "training"))
        if prior_seeds is None:
            final, records, prior = *_run(job.task, config), None
        else:
            final, records, prior = _run_with_prior(job.task, config, prior_seeds, groups_alike)
    last = records[-1] if records else None
    return spec | {
        "final_loss": final if math.isfinite(final) else None,
        "corrections": {} if last is None else last.correction,
        "slopes": {
            which: slopes(records, which, skip=round(config.warmup * config.steps))
            for which in ("own", "probe")
        },
        "prior": prior,
        "seconds": time.monotonic() - start,
    }


def _run(task: Task, config: RunConfig) -> tuple[float, list[RoundRecord]]:
    records = hdet.Records()
    trainer = Trainer(task, config, records, "cpu")
    while trainer.engine.num_steps < config.steps:
        trainer.step()
    trainer.converge()
    return evaluate(task, trainer.model)["loss"], list(records)


def _run_with_prior(
    task: Task, config: RunConfig, seeds: Sequence[int], groups_alike: bool
) -> tuple[float, list[RoundRecord], dict[str, Any]]:
    """Earlier runs first, with the uniform start; then one that begins with what they say."""
    prior = hdet.prior_from(
        [_run(task, replace(config, seed=seed))[1] for seed in seeds], spread=config.spread
    )
    if groups_alike:
        count, drop = len(prior.groups), statistics.geometric_mean(prior.drops)
        prior = hdet.Prior(prior.groups, (config.spread,) * count, (drop,) * count)
    records = hdet.Records()
    model = task.build_model(config.seed)
    optimizer = build_optimizer(config, task.parameter_groups(model))
    ensemble = hdet.VirtualEnsemble(
        model,
        optimizer,
        task.loss,
        num_replicas=config.replicas,
        explore=[prior.learning_rate(config.lr)],
        controllers=[hdet.Controller(form="paper", start=config.controller_start, end="floor")],
        scheduler=LambdaLR(optimizer, partial(one_cycle, total_steps=config.steps, warmup=config.warmup)),
        sync_every=config.sync_every,
        total_steps=config.steps,
        seed=config.seed,
        records=records,
    )
    ensemble.warm_start(config.noise_scale)
    streams = [task.train_batches(seed=config.seed, replica=r) for r in range(config.replicas)]
    for _ in range(config.steps):
        ensemble.step(batches=[next(stream) for stream in streams])
    ensemble.converge()
    told = {
        name: {"spread": spread, "drop": drop}
        for name, spread, drop in zip(prior.groups, prior.spreads, prior.drops, strict=True)
    }
    return evaluate(task, model)["loss"], list(records), told


def slopes(records: Sequence[RoundRecord], which: str, *, skip: int = 0) -> Mapping[str, float] | None:
    """Slope of the replicas' losses on the log learning rate: mean and deviation over rounds.

    Args:
        records: of a run with a spread of the learning rate.
        which: the replicas' own training losses, ``"own"``, or those on the ``"probe"``.
        skip: rounds that end up to this step are left out.

    >>> record = RoundRecord(round=0, step=9, num_replicas=2, losses=[1.0, 3.0],
    ...                      multipliers={"lr": [1.0, math.e]})
    >>> slopes([record], "own")
    {'mean': 2.0, 'deviation': 0.0, 'count': 1}
    """
    found = []
    for record in records:
        losses = record.losses if which == "own" else record.probes
        if record.step <= skip or not record.ends_round or "lr" not in record.multipliers:
            continue
        pairs = zip(record.multipliers["lr"], losses, strict=False)
        points = [(math.log(rho), loss) for rho, loss in pairs if loss is not None]
        if len(points) == record.num_replicas and len({x for x, _ in points}) > 1:
            found.append(statistics.linear_regression(*zip(*points, strict=True)).slope)
    if not found:
        return None
    return {"mean": statistics.fmean(found), "deviation": statistics.pstdev(found), "count": len(found)}

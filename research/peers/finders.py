"""hdet's own: the paper's controller, ours, the scout, the anchored controller, and both."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hdet.core.recipe import Recipe
from hdet.find import find_lr
from hdet.run.folder import RunFolder
from hdet.run.runner import run
from research.peers.base import Job, Method, Trained
from research.peers.plain import TAIL_PLAN, plain_run
from research.zoo.problem import Problem

__all__ = ["METHODS"]


def _run(job: Job, *, begins_at_peak: bool = False, **settings: Any) -> Trained:
    # One evaluation at each end: the time of more would be counted against us.
    config = job.config(evaluate_every=job.steps, **settings)
    if begins_at_peak:
        # The paper's controller takes over the value that it meets: in the warmup it would stay at that.
        config = replace(config, controller_start=round(config.warmup * config.steps))
    with tempfile.TemporaryDirectory(prefix="hdet-compare-") as path:
        folder = RunFolder.create(Path(path) / "run", config, {})
        result = run(config, folder, task=job.task)
    metrics = result.metrics if result.final_loss is not None else {}
    return Trained(metrics, result.found_lr)


def _find(job: Job, *, warmup: float) -> Trained:
    model = job.build_model()
    streams = [job.task.train_batches(seed=job.seed, replica=r) for r in range(job.num_replicas)]
    clip_norm = job.task.clip_norm if isinstance(job.task, Problem) else None
    found = find_lr(
        model,
        job.optimizer(model, job.start_lr),
        ([next(stream) for stream in streams] for _ in itertools.count()),
        job.task.loss,
        total_steps=job.steps,
        clip_norm=clip_norm,
    )
    rest = replace(job, start_lr=found.lr[0], steps=job.steps - found.num_steps)
    trained = plain_run(rest, warmup=warmup, anneal_to=Recipe.anneal_to, average_tail=Recipe.average_tail)
    return replace(trained, found_lr=found.lr[0])


def _method(name: str, description: str, **settings: Any) -> Method:
    return Method(name=name, description=description, run=partial(_run, **settings))


_PLAN = "10 % warmup, linear anneal"

METHODS = (
    _method(
        "hdet_paper",
        "replicas spread by 1/9; 10 % warmup, then the paper's controller (eq. 7), which replaces the anneal",
        begins_at_peak=True,
        controller="paper",
        scout=False,
    ),
    _method(
        "hdet_log",
        f"replicas spread by 1/9, a controller of the log LR on the plan; {_PLAN}",
        controller="log",
        scout=False,
    ),
    _method(
        "hdet_scout",
        f"short trials of many LRs in the first steps, then a restart; {_PLAN}",
        scout=True,
        controller="none",
    ),
    _method(
        "hdet_anchored",
        f"the LR follows the gradient along the way travelled, within a factor 2, 4 for a group; {_PLAN}",
        scout=False,
        anneal_to=0.0,
        average_tail=0.0,
    ),
    _method(
        "hdet_both",
        f"hdet.AutoLR: the scout, then the anchored controller; {TAIL_PLAN}",
    ),
    *(
        Method(
            name=f"hdet_find_{round(100 * warmup)}",
            description=f"hdet.find_lr, then {round(100 * warmup)} % warmup and the tail in what is left",
            run=partial(_find, warmup=warmup),
            is_default=False,
        )
        for warmup in (0.1, 0.25, 0.4)
    ),
)

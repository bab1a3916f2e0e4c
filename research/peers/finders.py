"""hdet's own: the paper's controller, ours of the same kind, and the search before the run."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hdet.auto import AutoLR
from hdet.errors import NotFiniteError
from hdet.lab.train.folder import RunFolder
from hdet.lab.train.runner import evaluate, run
from hdet.search.decisions import LEAST_STEPS
from hdet.search.with_torch import find_lr
from research.peers.base import Diverged, Job, Method, Trained, descend
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


def _find(job: Job) -> Trained:
    model = job.build_model()
    optimizer = job.optimizer(model, job.start_lr)
    found = find_lr(
        model,
        optimizer,
        job.batches(),
        job.task.loss,
        total_steps=job.steps,
        clip_norm=job.task.clip_norm if isinstance(job.task, Problem) else None,
    )
    steps = job.steps - found.num_steps  # the search is part of the budget
    auto = AutoLR(optimizer, total_steps=steps, model=model, found=found)
    try:
        descend(job, model, optimizer, job.batches(), steps, on_loss=auto.observe, after_step=auto.step)
    except NotFiniteError as error:
        raise Diverged from error
    return Trained(evaluate(job.task, model), found.lr[0], (found.low[0], found.high[0]))


def _method(name: str, description: str, **settings: Any) -> Method:
    return Method(
        name=name, description=description, run=partial(_run, find=False, **settings), least_steps=26
    )


METHODS = (
    _method(
        "hdet_paper",
        "replicas spread by 1/9; 10 % warmup, then the paper's controller (eq. 7), which replaces the anneal",
        begins_at_peak=True,
        controller="paper",
    ),
    _method(
        "hdet_log",
        "replicas spread by 1/9, a controller of the log LR on the plan; 10 % warmup, linear anneal",
        controller="log",
    ),
    Method(
        name="hdet_find",
        description="hdet.find_lr, then hdet.AutoLR with what it found: 40 % warmup, and the tail",
        run=_find,
        least_steps=LEAST_STEPS,
    ),
)

"""The learning-rate range test (Smith 2017), with the settings of Lightning's ``lr_find``."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hdet.lab.train.runner import evaluate
from hdet.method.recipe import one_cycle
from research.peers.base import Diverged, Job, Method, Trained, descend

__all__ = ["METHODS", "ramp", "suggestion"]

_RANGE = 1000.0
"""The ramp goes from start / 1000 to start * 1000."""
_SMOOTHING, _STOP_ABOVE, _SKIP_BEGIN, _SKIP_END = 0.98, 4.0, 10, 1


def suggestion(lrs: Sequence[float], losses: Sequence[float]) -> float | None:
    """The learning rate at the steepest fall of the loss from one point of the ramp to the next.

    The first ten points and the last are left out, as in Lightning; None if fewer than two remain.

    >>> suggestion([float(k) for k in range(16)], [5.0] * 11 + [5.0, 4.0, 2.0, 1.5, 9.0])
    12.0
    """
    kept = [
        (lr, loss)
        for lr, loss in list(zip(lrs, losses, strict=True))[_SKIP_BEGIN:-_SKIP_END]
        if math.isfinite(loss)
    ]
    if len(kept) < 2:
        return None
    gradients = torch.gradient(torch.tensor([loss for _, loss in kept], dtype=torch.float64))[0]
    return kept[int(gradients.argmin())][0]


def ramp(
    job: Job, model: nn.Module, batches: Iterator[Any], num_steps: int
) -> tuple[list[float], list[float]]:
    """Train while the learning rate grows exponentially; learning rates and smoothed losses.

    Stops when the smoothed loss is above four times the best.
    """
    optimizer = job.optimizer(model, job.start_lr)
    lrs: list[float] = []
    losses: list[float] = []
    average = 0.0
    for step in range(num_steps):
        lr = job.start_lr * _RANGE ** (2 * step / max(1, num_steps - 1) - 1)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = job.task.loss(model, next(batches))
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss.item()
        lrs.append(lr)
        losses.append(average / (1 - _SMOOTHING ** (step + 1)))
        if not losses[-1] <= _STOP_ABOVE * min(losses):  # NaN stops too
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return lrs, losses


def _run(job: Job) -> Trained:
    model = job.build_model()
    initial = copy.deepcopy(model.state_dict())
    batches = job.batches()
    num_steps = min(max(50, round(0.05 * job.steps)), job.steps - 1)
    lrs, losses = ramp(job, model, batches, num_steps)
    lr = suggestion(lrs, losses) or job.start_lr  # without one, a user keeps what he has
    model.load_state_dict(initial)
    remaining = job.steps - len(lrs)
    shape = partial(one_cycle, total_steps=remaining, anneal="linear")
    try:
        descend(job, model, job.optimizer(model, lr), batches, remaining, shape=shape)
    except Diverged:
        return Trained({}, lr)
    return Trained(evaluate(job.task, model), lr)


METHODS = (
    Method(
        name="range_test",
        description="LR range test around the start (x.001 to x1000, max(50, 5 %) steps, steepest fall), "
        "then 10 % warmup and linear anneal in the steps that are left",
        run=_run,
    ),
)

"""hdet's own: the paper's controller, ours of the same kind, and the search before the run."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from hdet import LearningRate, Probe, Thermostat, VirtualEnsemble
from hdet.auto import AutoLR
from hdet.errors import NotFiniteError
from hdet.lab.train.folder import RunFolder
from hdet.lab.train.runner import evaluate, run
from hdet.method.recipe import one_cycle
from hdet.round_record import RoundRecord
from hdet.search.decisions import LEAST_STEPS
from hdet.search.with_torch import find_lr
from research.peers.base import Diverged, Job, Method, Trained, descend
from research.zoo.problem import Problem

__all__ = ["METHODS", "nes_step"]

_LEAST_STEERED = 300
"""Steps, with those of the search, of a run that is long enough for a thermostat."""
_NUM_PROBED = 4
"""Training batches that a thermostat is judged on."""


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


def _find(job: Job, *, is_on_top: bool, is_steered: bool = False) -> Trained:
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
    steps = job.steps if is_on_top else job.steps - found.num_steps
    told = {"controllers": [Thermostat()], "probe": _probe(job)} if is_steered else {}
    auto = AutoLR(optimizer, total_steps=steps, model=model, found=found, **told)
    try:
        descend(job, model, optimizer, job.batches(), steps, on_loss=auto.observe, after_step=auto.step)
    except NotFiniteError as error:
        raise Diverged from error
    found_lr = next(iter(auto.found_lr.values())) if is_steered else found.lr[0]
    return Trained(evaluate(job.task, model), found_lr, found.num_steps)


def _probe(job: Job) -> Probe:
    """Take the first training batches, as the search does: other methods have no held-out data either."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.enable_grad():  # a differential equation's residual needs it
            return job.task.loss(model, batch)

    return Probe(islice(job.batches(), _NUM_PROBED), loss)


def nes_step(log_lr: float, losses: Sequence[float], multipliers: Sequence[float]) -> float:
    r"""Move the log learning rate by its natural gradient (Wierstra et al. 2014, separable NES).

    .. math:: \mu \leftarrow \mu + \sigma \sum_r u_r s_r, \qquad s_r = \log\rho_r / \sigma, \qquad
        u_r = \frac{\max(0, \log(N/2 + 1) - \log k_r)}{\sum_{k=1}^N \max(0, \log(N/2 + 1) - \log k)}
        - \frac1N

    where replica r has rank :math:`k_r`, from one for the lowest loss. The replicas' fixed spread takes the
    place of random samples, so that :math:`\sigma` cancels.

    >>> round(nes_step(0.0, [2.0, 1.0], [0.5, 2.0]), 6) == round(math.log(2), 6)
    True
    """
    count = len(losses)
    order = sorted(range(count), key=lambda r: losses[r])
    raw = [max(0.0, math.log(count / 2 + 1) - math.log(k)) for k in range(1, count + 1)]
    utilities = [value / math.fsum(raw) - 1 / count for value in raw]
    return log_lr + math.fsum(u * math.log(multipliers[r]) for u, r in zip(utilities, order, strict=True))


class _Nes:
    """Takes the records of the rounds, and moves the log of a factor on the plan."""

    log_factor = 0.0

    def write(self, record: RoundRecord) -> None:
        scores = [math.inf if score is None else score for score in record.probes]
        (multipliers,) = record.multipliers.values()
        self.log_factor = nes_step(self.log_factor, scores, multipliers)


def _nes(job: Job) -> Trained:
    model = job.build_model()
    optimizer = job.optimizer(model, job.start_lr)
    nes, probe = _Nes(), job.task.probe_batch()
    streams = [job.task.train_batches(seed=job.seed, replica=r) for r in range(job.num_replicas)]
    ensemble = VirtualEnsemble(
        model,
        optimizer,
        job.task.loss,
        num_replicas=job.num_replicas,
        vectorize=job.task.can_vectorize,
        probe=[probe],
        scheduler=LambdaLR(optimizer, lambda step: one_cycle(step, job.steps) * math.exp(nes.log_factor)),
        explore=[LearningRate(1 / 9, per_group=False)],
        sync_every=25,
        total_steps=job.steps,
        records=nes,
        seed=job.seed,
    )
    for _ in range(job.steps):
        losses = ensemble.step(batches=[next(stream) for stream in streams])
        if not losses.isfinite().any():
            raise Diverged
    return Trained(evaluate(job.task, model), job.start_lr * math.exp(nes.log_factor))


def _method(name: str, description: str, **settings: Any) -> Method:
    return Method(
        name=name, description=description, run=partial(_run, find=False, **settings), least_steps=26
    )


METHODS = (
    _method(
        "hdet_paper",
        "replicas spread by 1/9; 10 % warmup, then the paper's controller (eq. 7), which replaces the anneal",
        begins_at_peak=True,
        controllers=("paper",),
    ),
    _method(
        "hdet_log",
        "replicas spread by 1/9, a controller of the log LR on the plan; 10 % warmup, linear anneal",
        controllers=("log",),
    ),
    Method(
        name="hdet_nes",
        description="replicas spread by 1/9, the log LR moved by natural evolution strategies on the probe; "
        "10 % warmup, linear anneal",
        run=_nes,
    ),
    Method(
        name="hdet_find",
        description="hdet.find_lr, then hdet.AutoLR with what it found: 40 % warmup, and the tail",
        run=partial(_find, is_on_top=False),
        least_steps=LEAST_STEPS,
    ),
    Method(
        name="hdet_steered",
        description="hdet_find, with the thermostat, whose probe are the first training batches",
        run=partial(_find, is_on_top=False, is_steered=True),
        least_steps=_LEAST_STEERED,
        is_default=False,
    ),
    Method(
        name="hdet_steered_on_top",
        description="hdet_steered, but the run after the search has all steps of the budget",
        run=partial(_find, is_on_top=True, is_steered=True),
        least_steps=_LEAST_STEERED,
        is_default=False,
    ),
    Method(
        name="hdet_find_on_top",
        description="hdet_find, but the run after the search has all steps of the budget",
        run=partial(_find, is_on_top=True),
        least_steps=LEAST_STEPS,
        is_default=False,
    ),
)

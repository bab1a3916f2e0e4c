"""Arms: the recipe, the recipe without one of its parts, and what others offer instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hdet
from hdet.errors import HdetError
from hdet.lab.train.runner import evaluate
from hdet.tuning import Tuned
from research.explore.experiment import probe_of
from research.peers import METHODS
from research.peers.base import Diverged, Job, Method, Trained, descend
from research.recipe.task import Judged
from research.zoo.problem import Problem

__all__ = ["ARMS", "EVERYTHING"]

EVERYTHING, INSIDE = "everything", "everything, within"
_PEERS = ("prodigy", "mechanic", "schedulefree")
_NOTES = {"No thermostat": hdet.Thermostat, "The weight decay stays": hdet.HeldOutWeightDecay}
"""How what tune leaves out begins to say why."""


class _Loader:
    """The batches of a job, with the length of an epoch if there is one."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __iter__(self) -> Iterator[Any]:
        return self._job.batches()

    def __len__(self) -> int:
        if self._job.task.num_examples is None:
            raise TypeError("the data never repeats")
        return self._job.task.num_examples // (self._job.task.batch_size * self._job.num_replicas)


def _probe(problem: Problem) -> hdet.Probe:
    if isinstance(problem, Judged):
        return probe_of(problem.problem)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.enable_grad():  # a differential equation's residual needs it
            return problem.loss(model, batch)

    return hdet.Probe([problem.probe_batch()], loss)


def _tuned(job: Job, without: type | None = None, **settings: Any) -> tuple[Tuned, nn.Module, Any]:
    """Call tune. To leave out one controller, call it once more with the others that it chose."""
    problem, model = job.task, job.build_model()
    assert isinstance(problem, Problem)
    optimizer = job.optimizer(model, job.start_lr)
    settings = {"total_steps": job.steps, "clip_norm": problem.clip_norm, "progress": False} | settings
    auto = hdet.tune(model, optimizer, _Loader(job), problem.loss, held_out=_probe(problem), **settings)
    if without is None:
        return auto, model, optimizer
    left_out = {kind for words, kind in _NOTES.items() if any(note.startswith(words) for note in auto.notes)}
    kept = [kind() for kind in _NOTES.values() if kind not in left_out | {without}]
    return _tuned(job, controllers=kept, **settings)


def _run(job: Job, *, is_on_top: bool = True, **settings: Any) -> Trained:
    auto, model, optimizer = _tuned(job, **settings)
    if not is_on_top:
        assert auto.found is not None
        job = replace(job, steps=job.steps - auto.found.num_steps)
        auto, model, optimizer = _tuned(job, **settings)
    try:
        descend(job, model, optimizer, job.batches(), job.steps, on_loss=auto.observe, after_step=auto.step)
    except HdetError as error:  # the guard has given up
        raise Diverged from error
    ends = {"steered_lr": next(iter(auto.found_lr.values()))}
    ends["weight_decay"] = max(group.get("weight_decay", 0.0) for group in optimizer.param_groups)
    found = auto.found
    metrics = evaluate(job.task, model) | ends
    return Trained(metrics) if found is None else Trained(metrics, found.lr[0], found.num_steps)


def _arm(name: str, description: str, **settings: Any) -> Method:
    return Method(name=name, description=description, run=partial(_run, **settings))


_ARMS = (
    replace(METHODS["plain_tail"], name="guess"),
    _arm(
        "find", "tune without controllers: the search, the schedule, the guard and the tail", controllers=()
    ),
    _arm("without decay", "tune, but the weight decay stays", without=hdet.HeldOutWeightDecay),
    _arm("without thermostat", "tune, but nothing steers the learning rate", without=hdet.Thermostat),
    _arm("without search", "tune from the guess", learning_rate="keep"),
    _arm(EVERYTHING, "tune"),
    _arm(INSIDE, "tune, with the steps of the search taken from the run", is_on_top=False),
    *(METHODS[name] for name in _PEERS),
)
ARMS: dict[str, Method] = {arm.name: arm for arm in _ARMS}
"""By name, in the order of the tables."""

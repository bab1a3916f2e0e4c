"""Arms: the recipe, the recipe without one of its parts, and what others offer instead."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from hdet import HeldOutWeightDecay, Probe, Thermostat
from research.explore.experiment import probe_of
from research.peers import METHODS
from research.peers.base import Job, Method, Trained
from research.peers.finders import auto_run
from research.recipe.task import Judged
from research.zoo.problem import Problem

__all__ = ["ARMS", "EVERYTHING", "PEERS", "repeats"]

EVERYTHING, INSIDE = "everything", "everything, within"
PEERS = ("prodigy", "mechanic", "schedulefree")


def repeats(problem: Problem) -> bool:
    """Tell whether a run sees its training data more than once."""
    seen = problem.num_steps * problem.batch_size * problem.num_replicas
    return problem.num_examples is not None and seen > problem.num_examples


def _probe(problem: Problem) -> Probe:
    if isinstance(problem, Judged):
        return probe_of(problem.problem)

    def loss(model: nn.Module, batch: object) -> Tensor:
        with torch.enable_grad():  # a differential equation's residual needs it
            return problem.loss(model, batch)

    return Probe([problem.probe_batch()], loss)


def _recipe(
    job: Job, *, searches: bool = True, steers: bool = True, decays: bool = True, is_on_top: bool = True
) -> Trained:
    problem, controllers = job.task, []
    assert isinstance(problem, Problem)
    if steers:
        controllers.append(Thermostat())
    if decays and repeats(problem) and _decays(job):
        controllers.append(HeldOutWeightDecay())
    probe = _probe(problem) if controllers else None
    return auto_run(job, is_on_top=is_on_top, searches=searches, controllers=controllers, probe=probe)


def _decays(job: Job) -> bool:
    groups = job.optimizer(job.build_model(), 1.0).param_groups
    return any(group.get("weight_decay", 0.0) > 0 for group in groups)


def _arm(name: str, description: str, **parts: bool) -> Method:
    return Method(name=name, description=description, run=partial(_recipe, **parts))


_ARMS = (
    replace(METHODS["plain_tail"], name="guess"),
    _arm("find", "find_lr, then AutoLR", steers=False, decays=False),
    _arm("without decay", "find_lr, AutoLR and the thermostat", decays=False),
    _arm("without thermostat", "find_lr, AutoLR, and weight decay by held-out data", steers=False),
    _arm("without search", "AutoLR, the thermostat and weight decay, from the guess", searches=False),
    _arm(EVERYTHING, "find_lr, AutoLR, the thermostat, and weight decay by held-out data"),
    _arm(INSIDE, "everything, with the search taken from the steps", is_on_top=False),
    *(METHODS[name] for name in PEERS),
)
ARMS: dict[str, Method] = {arm.name: arm for arm in _ARMS}
"""By name, in the order of the tables."""

"""Population-based training (Jaderberg et al. 2017) of the learning rate, in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hdet.lab.train.runner import evaluate
from hdet.method.fan_out import derived_seed
from hdet.method.recipe import one_cycle
from research.peers.base import Diverged, Job, Method, Trained
from research.peers.members import Members

__all__ = ["FACTORS", "METHODS", "NUM_ROUNDS", "Exploit", "exploits", "first_lrs"]

Exploit = tuple[int, int, float]
"""Target, source, and the factor on the source's learning rate."""

FACTORS = (0.8, 1.25)
"""On the learning rate of the member that is copied."""
NUM_ROUNDS = 10


def first_lrs(job: Job, generator: torch.Generator) -> list[float]:
    """A learning rate for every member, log-uniform within a factor of 10 of the start."""
    places = torch.rand(job.num_replicas, generator=generator, dtype=torch.float64) * 2 - 1
    return [job.start_lr * 10**place for place in places.tolist()]


def exploits(scores: Sequence[float], generator: torch.Generator) -> list[Exploit]:
    """Truncation selection: each of the worst quarter copies one of the best quarter, and explores.

    Args:
        scores: a loss per member; not finite for one that has diverged.
        generator: chooses the sources and the factors.

    >>> [(target, source) for target, source, _ in exploits([3, 1, 2, math.inf], torch.Generator())]
    [(3, 1)]
    """
    order = sorted(range(len(scores)), key=lambda i: scores[i])
    count = max(1, len(scores) // 4) if len(scores) > 1 else 0
    best, worst = order[:count], order[len(order) - count :]

    def draw(size: int) -> int:
        return int(torch.randint(size, (), generator=generator))

    return [(target, best[draw(count)], FACTORS[draw(2)]) for target in worst]


def _run(job: Job) -> Trained:
    members = Members(job)
    generator = torch.Generator().manual_seed(derived_seed(job.seed, "population"))
    lrs = first_lrs(job, generator)
    interval = max(1, job.steps // NUM_ROUNDS)
    for step in range(job.steps):
        if step and step % interval == 0:
            for target, source, factor in exploits(members.scores(), generator):
                members.copy(source, target)
                lrs[target] = lrs[source] * factor
        factor = one_cycle(step, job.steps, anneal="linear")
        losses = members.step([lr * factor for lr in lrs])
        if not losses.isfinite().any():
            raise Diverged
    scores = members.scores()
    best = min(range(members.count), key=lambda i: scores[i])
    if not math.isfinite(scores[best]):
        raise Diverged
    members.rows.write_template(best)
    return Trained(evaluate(job.task, members.model), lrs[best])


METHODS = (
    Method(
        name="pbt",
        description="population-based training: N members on a batch each, LRs within x10 of the start, the "
        "worst quarter copies the best at x0.8 or x1.25 every 10 %; 10 % warmup, linear anneal",
        run=_run,
    ),
)

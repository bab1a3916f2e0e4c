"""One run with AutoLR's schedule: scores of every round's last weights and of their mean, steered or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hdet.lab.train.runner import evaluate
from hdet.method.recipe import Recipe, tail_steps
from hdet.method.thermostat import Round, round_ends
from hdet.replicas.copies import same_draws
from hdet.replicas.losses import evaluating
from hdet.replicas.probe import batch_statistics
from hdet.replicas.tail import TailMean
from research.peers.base import Diverged, Job, descend

__all__ = ["NUM_SCORED", "ScoredRounds", "train_run"]

NUM_SCORED = 20
"""Rounds that are scored: the warm-up has 16."""

Steer = Callable[[Sequence[Round]], float]
"""Gives the factor on the schedule, from the rounds so far."""


class ScoredRounds:
    """Averages the weights of each round and scores them, and lets a thermostat move the schedule's factor.

    Args:
        job: whose task and batches are used.
        model: what is trained.
        recipe: gives the planned learning rate.
        steer: moves the factor after every scored round; None leaves it at one.
        num_scored: rounds that are scored.
        is_law: keep everything that the law may be asked for, not only what a thermostat needs.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        recipe: Recipe,
        *,
        steer: Steer | None = None,
        num_scored: int = NUM_SCORED,
        is_law: bool = False,
    ) -> None:
        self._job, self._model, self._recipe, self._steer = job, model, recipe, steer
        self._parameters = job.parameters(model)
        self._num_scored, self._is_law = num_scored, is_law
        self._probe, self._batch = job.task.probe_batch(), next(job.batches())
        self._ends = round_ends(job.steps)
        self._mean, self._before = _flat(self._parameters), _flat(self._parameters)
        self._last_mean, self._last_move = self._mean.clone(), torch.zeros_like(self._mean)
        self._taken, self._step, self._losses = 0, 0, list[float]()
        self.rounds: list[Round] = []
        self.more: list[dict[str, float]] = []
        """What only the law is asked for, by round."""
        self.factor = 1.0

    def shape(self, step: int) -> float:
        """Give the factor on the peak for a step."""
        return self._recipe.shape(step) * self.factor

    def observe(self, loss: float) -> None:
        """Take the training loss of a step."""
        self._losses.append(loss)

    @torch.no_grad()
    def after_step(self) -> None:
        """Average the weights; at the end of a round score them, and move the factor."""
        self._step += 1
        if len(self.rounds) == self._num_scored:
            return
        self._taken += 1
        weights = _flat(self._parameters)
        self._mean = weights if self._taken == 1 else self._mean.lerp_(weights, 1 / self._taken)
        if self._step == self._ends[len(self.rounds) + 1]:
            self._end_round(weights)

    def _end_round(self, weights: Tensor) -> None:
        last = self._step - 1
        begin = self._step - self._taken
        shape = math.fsum(self._recipe.shape(s) for s in range(begin, self._step)) / self._taken
        score = self._score
        self.rounds.append(
            Round(
                step=self._step,
                middle=last + 1 - (self._taken - 1) / 2,
                lr=shape * self.factor,
                end=score(None, self._probe),
                mean=score(self._mean, self._probe),
                train=math.fsum(self._losses) / len(self._losses),
            )
        )
        if self._is_law:
            move = weights - self._before
            lengths = move.norm() * self._last_move.norm()
            self.more.append(
                {
                    "wide": score((self._mean + self._last_mean) / 2, self._probe),
                    "train_end": score(None, self._batch),
                    "train_mean": score(self._mean, self._batch),
                    "move": move.norm().item(),
                    "scatter": (weights - self._mean).norm().item(),
                    "cosine": (move @ self._last_move / lengths.clamp(min=1e-30)).item(),
                    "norm": weights.norm().item(),
                }
            )
            self._last_move = move
        self._before, self._last_mean = weights, self._mean
        self._taken, self._losses = 0, []
        if self._steer is not None:
            self.factor = self._steer(self.rounds)

    def _score(self, weights: Tensor | None, batch: Any) -> float:
        """Give the loss of a batch, with these weights in the place of the model's own if they are given."""
        kept = None if weights is None else _flat(self._parameters)
        if weights is not None:
            _put(self._parameters, weights)
        # Some losses differentiate: a differential equation's residual is one.
        with same_draws(), evaluating(self._model), batch_statistics(self._model), torch.enable_grad():
            loss = self._job.task.loss(self._model, batch).item()
        if kept is not None:
            _put(self._parameters, kept)
        return loss


def _flat(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


def _put(parameters: Sequence[Tensor], flat: Tensor) -> None:
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.detach().copy_(part.view_as(p))


def train_run(job: Job, *, steer: Steer | None = None, num_scored: int = NUM_SCORED, is_law: bool = False):
    """Train with AutoLR's schedule and tail; give the final metrics (none if it diverged) and the rounds."""
    model = job.build_model()
    optimizer = job.optimizer(model, job.start_lr)
    parameters = job.parameters(model)
    recipe = Recipe(total_steps=job.steps)
    steps, tail = tail_steps(job.steps, recipe.average_tail), TailMean(parameters)
    rounds = ScoredRounds(job, model, recipe, steer=steer, num_scored=num_scored, is_law=is_law)
    done = 0

    def after_step() -> None:
        nonlocal done
        done += 1
        rounds.after_step()
        if done in steps:
            tail.take(parameters, done)

    try:
        descend(
            job,
            model,
            optimizer,
            job.batches(),
            job.steps,
            shape=rounds.shape,
            after_step=after_step,
            on_loss=rounds.observe,
        )
    except Diverged:
        return {}, rounds
    tail.put(parameters)
    return evaluate(job.task, model), rounds

"""Method: one way to train from a learning rate that may be wrong. All see the same batches and weights."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from hdet.checks import require_choice, require_count, require_number
from hdet.errors import HdetError, install_command
from hdet.lab.tasks.task import Task
from hdet.lab.train.config import RunConfig
from hdet.lab.train.runner import evaluate
from hdet.lab.train.trainers import build_optimizer
from hdet.method.fan_out import derived_seed
from hdet.replicas.rows import join
from research.zoo.problem import Problem

__all__ = ["Diverged", "Job", "Method", "OptimizerKind", "Outcome", "Trained", "descend", "load_package"]

OptimizerKind = Literal["adamw", "sgd"]

_DIVERGED_ABOVE = 2.0
"""Final loss over the untrained model's, above which a run has diverged."""


class Diverged(Exception):
    """The training loss is not finite, and no later step can make it so."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a method is given: the problem, and the budget."""

    task: Task
    start_lr: float
    steps: int
    seed: int
    num_replicas: int
    optimizer_kind: OptimizerKind

    def build_model(self) -> nn.Module:
        """The initial weights, the same for every method."""
        return self.task.build_model(self.seed)

    def batches(self) -> Iterator[Any]:
        """One batch per step: those of all replicas, joined."""
        streams = [self.task.train_batches(seed=self.seed, replica=r) for r in range(self.num_replicas)]
        while True:
            yield join([next(stream) for stream in streams])

    def config(self, **settings: Any) -> RunConfig:
        """This job as the settings of ``hdet run``."""
        return RunConfig(
            task=type(self.task).__name__,
            lr=self.start_lr,
            steps=self.steps,
            replicas=self.num_replicas,
            optimizer=self.optimizer_kind,
            seed=self.seed,
            **settings,
        )

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """The optimizer that is compared: the problem's own, or AdamW or SGD as ``hdet run`` builds it."""
        groups = self.task.parameter_groups(model)
        if isinstance(self.task, Problem):
            return self.task.build_optimizer(groups, lr)
        return build_optimizer(replace(self.config(), lr=lr), groups)

    def clip(self, model: nn.Module) -> None:
        """Clip gradients where the problem says so."""
        if isinstance(self.task, Problem) and self.task.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters(model), self.task.clip_norm)

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """All trained parameters in one group: not every package's optimizer takes several."""
        return [p for group in self.task.parameter_groups(model) for p in group["params"]]


@dataclass(frozen=True)
class Trained:
    """What a method returns: the final metrics, and the learning rate that it found if it looks for one."""

    metrics: dict[str, float]
    found_lr: float | None = None
    search_steps: int | None = None
    """Steps that it took before the run, if it did."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run of a method."""

    final_loss: float
    """Held-out loss at the end; infinite if there is none."""
    metrics: dict[str, float]
    seconds: float
    """Wall-clock from building the model to the last evaluation."""
    found_lr: float | None
    diverged: bool
    """Whether the loss is not finite, or more than twice that of the untrained model."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the comparison.

    Args:
        name: as on the command line.
        description: one line, with the schedule that it trains with.
        run: trains and evaluates.
        cost: how many runs of the given length it takes.
        package: module that must be installed.
        extra: the extra of hdet that brings it.
        uses_start: whether anything depends on the starting learning rate.
        is_default: whether a comparison has it that names no methods.
        runs_here: whether it trains in this process, and so can be timed step by step.
        least_steps: the shortest run that it can train.
    """

    name: str
    description: str
    run: Callable[[Job], Trained]
    cost: int = 1
    package: str | None = None
    extra: str = "research"
    uses_start: bool = True
    is_default: bool = True
    runs_here: bool = True
    least_steps: int = 1

    def require(self, steps: int | None = None) -> None:
        """Raise if the package that it needs is missing, or if a run has too few steps for it."""
        if self.package is not None:
            load_package(self.package, self.extra)
        if steps is not None and steps < self.least_steps:
            raise ValueError(
                f"steps must be at least {self.least_steps} for {self.name}, got {steps}: train longer, or "
                "leave it out of --methods"
            )

    def train(
        self,
        task: Task,
        start_lr: float,
        steps: int,
        seed: int = 0,
        num_replicas: int = 8,
        optimizer_kind: OptimizerKind = "adamw",
    ) -> Outcome:
        """Train for ``steps`` optimizer steps on the batches of ``num_replicas`` replicas.

        Args:
            task: the problem.
            start_lr: where a user would begin.
            steps: the budget; what a method needs for its search is part of it.
            seed: of weights, batches and everything else that is random.
            num_replicas: streams of batches, all of which are used in every step.
            optimizer_kind: ``"adamw"`` or ``"sgd"`` (with momentum 0.9), both without weight decay.
        """
        job = Job(
            task=task,
            start_lr=require_number("start_lr", start_lr, above=0),
            steps=require_count("steps", steps),
            seed=require_count("seed", seed, at_least=0),
            num_replicas=require_count("num_replicas", num_replicas),
            optimizer_kind=require_choice("optimizer_kind", optimizer_kind, ("adamw", "sgd")),  # pyright: ignore[reportArgumentType]
        )
        untrained = evaluate(task, job.build_model())["loss"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "training"))
            start = time.monotonic()
            try:
                trained = self.run(job)
            except Diverged:
                trained = Trained({})
            seconds = time.monotonic() - start
        loss = trained.metrics.get("loss", math.inf)
        loss = loss if math.isfinite(loss) else math.inf
        return Outcome(
            final_loss=loss,
            metrics=trained.metrics,
            seconds=seconds,
            found_lr=trained.found_lr,
            diverged=loss > _DIVERGED_ABOVE * untrained,
        )


def descend(
    job: Job,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterator[Any],
    num_steps: int,
    *,
    shape: Callable[[int], float] | None = None,
    after_step: Callable[[], None] = lambda: None,
    on_loss: Callable[[float], None] = lambda _: None,
) -> None:
    """Plain training; raises :class:`Diverged` at the first loss that is not finite.

    Args:
        job: whose task it is.
        model: what is trained.
        optimizer: its learning rates are the peaks.
        batches: the stream, which goes on from where it is.
        num_steps: how many steps.
        shape: factor on the peaks by step; None leaves the learning rate to the optimizer.
        after_step: called after every step.
        on_loss: called with the loss of every step, finite or not.
    """
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(num_steps):
        if shape is not None:
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * shape(step)
        loss = job.task.loss(model, next(batches))
        on_loss(loss.item())
        if not math.isfinite(loss.item()):
            raise Diverged
        optimizer.zero_grad()
        loss.backward()
        job.clip(model)
        optimizer.step()
        after_step()


def load_package(name: str, extra: str = "research") -> Any:
    """Import a package that research needs; a missing one says how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name not in (name, package):
            raise
        raise HdetError(f"{package} is missing. Install it: {install_command(extra)}") from error

"""Judged: a problem of the recipe as a task, so that every peer can train on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.swa_utils import update_bn

from research.explore.problem import Problem
from research.recipe.problems import PROBLEMS
from research.zoo import problem as zoo
from research.zoo.catalogue import problem_of

__all__ = ["Judged", "task_of"]

_NUM_REFRESHED = 50


class Judged(zoo.Problem):
    """A problem with a weight decay.

    A model with BatchNorm is judged with statistics that are taken anew, from training data, whoever has
    trained it: the mean of several weights has none of its own.
    """

    num_replicas = 1

    def __init__(self, problem: Problem, decay: float) -> None:
        self.problem, self.weight_decay = problem, decay
        self.num_steps, self.batch_size = problem.num_steps, problem.batch_size
        self.learning_rate, self.clip_norm = problem.guess, problem.clip_norm
        self.num_examples = len(problem.parts().train[0])

    def build_model(self, seed: int) -> nn.Module:
        """Build the model of the problem."""
        return self.problem.model(seed)

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Part what decays from what does not."""
        return self.problem.groups(model, self.weight_decay)

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Build the optimizer of the problem."""
        return self.problem.optimizer_over(groups, lr)

    def train_batches(self, *, seed: int, replica: int = 0, start: int = 0) -> Iterator[Any]:
        """Shuffled epochs."""
        return islice(self.problem.batches(seed), start, None)

    def probe_batch(self) -> Any:
        """Held-out data that the run may look at."""
        return self.problem.parts().probe

    def evaluation_batches(self) -> Iterable[Any]:
        """Held-out data that only the table sees."""
        return [self.problem.parts().test]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Give the loss of the problem."""
        return self.problem.loss(model, batch)

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Loss, and accuracy and the loss at the best temperature where there are classes."""
        if any(isinstance(module, _BatchNorm) for module in model.modules()):
            update_bn(islice(self.problem.batches(0), _NUM_REFRESHED), model)
        (part,) = batches
        found = self.problem.measured(model, part)._asdict()
        return {name: value for name, value in found.items() if value is not None}


def task_of(name: str, decay: float | None = None) -> zoo.Problem:
    """Give the task of a problem; None is the weight decay that people have where they did not look."""
    if name not in PROBLEMS:
        return problem_of(name)
    return Judged(PROBLEMS[name], PROBLEMS[name].default_decay if decay is None else decay)

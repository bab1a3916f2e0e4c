"""Examples and Classified: what problems have in common whose data is a table of examples."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.lab.tasks.task import batch_generator, mean
from research.zoo.problem import Problem
from research.zoo.sources import shuffled_epochs

__all__ = ["Classified", "Examples", "Parts", "parted"]

Parts = Mapping[str, tuple[Tensor, ...]]
"""Tensors of the parts ``train``, ``probe`` and ``evaluation``. Their first dimension counts the examples."""


class Examples(Problem, abc.ABC):
    """Examples are rows of tensors, and every epoch has a new order."""

    num_at_once: ClassVar[int] = 500
    """Examples per batch of the evaluation."""

    @abc.abstractmethod
    def parts(self) -> Parts:
        """All examples. A subclass keeps them, for this is asked often."""

    def finished(self, rows: tuple[Tensor, ...], generator: torch.Generator) -> Any:
        """A batch of these rows; a subclass may add noise to it."""
        return rows

    def train_batches(self, *, seed: int, replica: int = 0, start: int = 0) -> Iterator[Any]:
        """Shuffled epochs, another order for every replica."""
        rows = self.parts()["train"]
        epochs = shuffled_epochs(len(rows[0]), self.batch_size, seed=seed, replica=replica, start=start)
        for step, chosen in enumerate(epochs, start):
            yield self.finished(
                tuple(column[chosen] for column in rows), batch_generator(seed, replica, step)
            )

    def probe_batch(self) -> Any:
        """Examples that are neither trained nor evaluated on."""
        return self.finished(self.parts()["probe"], torch.Generator().manual_seed(1))

    def evaluation_batches(self) -> Iterable[Any]:
        """Held-out examples."""
        columns = [column.split(self.num_at_once) for column in self.parts()["evaluation"]]
        generator = torch.Generator().manual_seed(2)
        return [self.finished(rows, generator) for rows in zip(*columns, strict=True)]


class Classified(Examples):
    """Inputs and classes."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Loss and accuracy."""
        losses, hits = [], []
        for inputs, classes in batches:
            logits = model(inputs)
            losses.append(F.cross_entropy(logits, classes).item())
            hits.append((logits.argmax(dim=-1) == classes).float().mean().item())
        return {"loss": mean(losses), "accuracy": mean(hits)}


def parted(columns: tuple[Tensor, ...], *, num_probed: int, num_evaluated: int) -> Parts:
    """Deal out rows that are in random order: to the probe, to the evaluation, and the rest to training.

    >>> parts = parted((torch.arange(10),), num_probed=2, num_evaluated=3)
    >>> [len(parts[name][0]) for name in ("train", "probe", "evaluation")]
    [5, 2, 3]
    """
    sizes = [num_probed, num_evaluated, len(columns[0]) - num_probed - num_evaluated]
    probe, evaluation, train = zip(*(column.split(sizes) for column in columns), strict=True)
    return {"train": train, "probe": probe, "evaluation": evaluation}

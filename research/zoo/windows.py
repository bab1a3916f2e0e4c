"""NextSymbol: what language models of the zoo have in common."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.lab.tasks.task import batch_generator
from research.zoo.problem import Problem

__all__ = ["NextSymbol"]

Windows = tuple[Tensor, Tensor]


class NextSymbol(Problem, abc.ABC):
    """Predict the next character or word of a text, in windows of it.

    Windows to train on are drawn at random, and a run sees only a part of the text: data does not repeat.
    Held-out windows are evenly spread over their texts.
    """

    length: ClassVar[int]
    """Symbols per window."""
    num_evaluated: ClassVar[int] = 2048
    """Windows to evaluate on."""

    @abc.abstractmethod
    def texts(self) -> Mapping[str, Tensor]:
        """Symbols as numbers: ``train``, ``probe`` and ``evaluation``."""

    def train_batches(self, *, seed: int, replica: int = 0, start: int = 0) -> Iterator[Windows]:
        """Random windows."""
        text = self.texts()["train"]
        for step in itertools.count(start):
            generator = batch_generator(seed, replica, step)
            yield self._windows(
                text, torch.randint(len(text) - self.length, (self.batch_size,), generator=generator)
            )

    def probe_batch(self) -> Windows:
        """Windows of held-out documents that are not evaluated on."""
        return self._spread(self.texts()["probe"], 256)

    def evaluation_batches(self) -> Iterable[Windows]:
        """Windows of held-out documents."""
        tokens, targets = self._spread(self.texts()["evaluation"], self.num_evaluated)
        return list(zip(tokens.split(256), targets.split(256), strict=True))

    def loss(self, model: nn.Module, batch: Windows) -> Tensor:
        """Cross-entropy of the next symbol."""
        tokens, targets = batch
        return F.cross_entropy(model(tokens).flatten(0, -2), targets.flatten())

    def _spread(self, text: Tensor, count: int) -> Windows:
        return self._windows(text, torch.arange(count) * (len(text) - self.length) // count)

    def _windows(self, text: Tensor, starts: Tensor) -> Windows:
        window = text[starts.unsqueeze(1) + torch.arange(self.length + 1)].long()
        return window[:, :-1], window[:, 1:]

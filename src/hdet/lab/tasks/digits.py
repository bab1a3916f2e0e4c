"""Scikit-learn's handwritten digits: a small set that repeats."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.lab.limits import Share, require_hinted
from hdet.lab.tasks.task import Task, epoch_orders, mean
from hdet.method.fan_out import derived_seed

_NUM_TRAIN, _NUM_PROBE = 1197, 200  # 400 remain for evaluation


@dataclass(frozen=True, kw_only=True)
class Digits(Task):
    """1797 images of 8 x 8 pixels: 1197 to train on, epoch after epoch, 200 for the probe, 400 held out.

    Args:
        model: ``"mlp"``, one hidden layer, or ``"conv"``, two convolutions.
        width: hidden units, or channels.
        dropout: before the last layer.
        batch_size: images per replica and step.
    """

    model: Literal["mlp", "conv"] = "mlp"
    width: int = 32
    dropout: Share = 0.0
    batch_size: int = 8
    _data: tuple[Tensor, Tensor] = field(init=False, repr=False, compare=False)

    learning_rate = 3e-3
    num_steps = 600
    num_examples = _NUM_TRAIN

    def __post_init__(self) -> None:
        require_hinted(Digits, vars(self))
        if self.batch_size > _NUM_TRAIN:
            raise ValueError(
                f"batch_size must be at most {_NUM_TRAIN}, the training set, got {self.batch_size}"
            )
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        pixels = torch.as_tensor(images, dtype=torch.float32)[order] / 16
        object.__setattr__(self, "_data", (pixels, torch.as_tensor(labels)[order].long()))

    def build_model(self, seed: int) -> nn.Module:
        """The network, initialised from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            if self.model == "mlp":
                layers: list[nn.Module] = [nn.Linear(64, self.width), nn.ReLU()]
                size = self.width
            else:
                layers = [
                    nn.Unflatten(1, (1, 8, 8)),
                    nn.Conv2d(1, self.width, 3, padding=1),
                    nn.ReLU(),
                    nn.Conv2d(self.width, self.width, 3, stride=2, padding=1),
                    nn.ReLU(),
                    nn.Flatten(),
                ]
                size = 16 * self.width
            dropout = [nn.Dropout(self.dropout)] if self.dropout else []
            return nn.Sequential(*layers, *dropout, nn.Linear(size, 10))

    def train_batches(
        self, *, seed: int, replica: int = 0, start: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled epochs, another order for every replica."""
        order = epoch_orders(_NUM_TRAIN, seed, "epoch", replica)
        pixels, labels = self._data
        for step in itertools.count(start):
            epoch, place = divmod(step, _NUM_TRAIN // self.batch_size)
            chosen = order(epoch)[place * self.batch_size :][: self.batch_size]
            yield pixels[chosen], labels[chosen]

    def probe_batch(self) -> tuple[Tensor, Tensor]:
        """200 images that are neither trained nor evaluated on."""
        rows = slice(_NUM_TRAIN, _NUM_TRAIN + _NUM_PROBE)
        return self._data[0][rows], self._data[1][rows]

    def evaluation_batches(self) -> Iterable[tuple[Tensor, Tensor]]:
        """400 held-out images."""
        rows = slice(_NUM_TRAIN + _NUM_PROBE, None)
        return [(self._data[0][rows], self._data[1][rows])]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Loss and accuracy."""
        losses, hits = [], []
        for pixels, labels in batches:
            logits = model(pixels)
            losses.append(F.cross_entropy(logits, labels).item())
            hits.append((logits.argmax(dim=1) == labels).float().mean().item())
        return {"loss": mean(losses), "accuracy": mean(hits)}

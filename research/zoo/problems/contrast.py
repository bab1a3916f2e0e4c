"""Contrastive learning: images of the same letter are near each other, whatever the font."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from hdet.lab.tasks.task import batch_generator
from hdet.method.fan_out import derived_seed
from research.zoo.glyphs import LATIN, SIZE, latin_glyphs
from research.zoo.problem import Problem

__all__ = ["FontsContrastive"]

_NUM_PAIRS = 24
_TEMPERATURE = 0.25


class FontsContrastive(Problem):
    r"""Find the same letter in another font among 24 images, by the angle between embeddings (InfoNCE).

    .. math:: -\log \frac{\exp(u_i \cdot v_i / 0.25)}{\sum_j \exp(u_i \cdot v_j / 0.25)}

    An example has 24 of 62 letters and digits, two images of each. Some of them, like O and 0, can hardly be
    told apart. Images come from fonts of Debian. Whole families of fonts are held out. A run draws a part of
    all pairs.
    """

    family = "contrastive embedding"
    split = "held out"
    num_replicas = 2
    num_steps = 400
    batch_size = 3
    learning_rate = 0.1
    weight_decay = 1e-4
    loss_unit = "nats per letter"

    def build_model(self, seed: int) -> nn.Module:
        """Two convolutions and a linear layer, with LayerNorm before it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return nn.Sequential(
                nn.Conv2d(1, 12, 4, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(12, 24, 4, stride=2, padding=1),
                nn.ReLU(),
                nn.Flatten(),
                nn.LayerNorm(24 * (SIZE // 4) ** 2),
                nn.Linear(24 * (SIZE // 4) ** 2, 32),
            )

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """SGD with Nesterov's momentum."""
        return SGD(groups, lr=lr, momentum=0.9, nesterov=True, weight_decay=self.weight_decay)

    def train_batches(self, *, seed: int, replica: int = 0, start: int = 0) -> Iterator[Tensor]:
        """Random letters in random fonts."""
        for step in itertools.count(start):
            yield _pairs("train", self.batch_size, batch_generator(seed, replica, step))

    def probe_batch(self) -> Tensor:
        """Pairs of fonts that are neither trained nor evaluated on."""
        return _pairs("probe", 16, torch.Generator().manual_seed(1))

    def evaluation_batches(self) -> Iterable[Tensor]:
        """Pairs of held-out fonts."""
        return _pairs("evaluation", 256, torch.Generator().manual_seed(2)).split(16)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Cross-entropy of the right image among those of an example."""
        embedded = F.normalize(model(batch.flatten(0, 2)), dim=-1).unflatten(0, batch.shape[:3])
        one, other = embedded.unbind(1)
        likeness = one @ other.transpose(-2, -1) / _TEMPERATURE
        return F.cross_entropy(likeness.flatten(0, 1), torch.arange(_NUM_PAIRS).repeat(len(batch)))


def _pairs(part: str, count: int, generator: torch.Generator) -> Tensor:
    """Images as (example, first or second, letter, channel, row, column)."""
    images, rows, counts = _by_letter(part)
    letters = torch.rand(count, len(LATIN), generator=generator).argsort(dim=1)[:, :_NUM_PAIRS]
    drawn, further = torch.rand(2, count, _NUM_PAIRS, generator=generator)
    first = (drawn * counts[letters]).long()
    second = (first + 1 + (further * (counts[letters] - 1)).long()) % counts[letters]  # never the same
    chosen = torch.stack([rows[letters, first], rows[letters, second]], dim=1)
    return images[chosen].unsqueeze(3).float() / 255


@functools.lru_cache(maxsize=3)
def _by_letter(part: str) -> tuple[Tensor, Tensor, Tensor]:
    """All images, the numbers of those of every letter, and how many it has."""
    images, classes = latin_glyphs()[part], latin_glyphs()[f"{part}_classes"]
    found = [(classes == letter).nonzero().squeeze(1) for letter in range(len(LATIN))]
    counts = torch.tensor([len(rows) for rows in found])
    return images, nn.utils.rnn.pad_sequence(found, batch_first=True), counts

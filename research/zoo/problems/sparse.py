"""Sparse inputs, where Adagrad is at home: hashed words, and word vectors."""

from __future__ import annotations

import functools
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adagrad, Optimizer

from hdet.lab.tasks.task import batch_generator
from hdet.method.fan_out import derived_seed
from research.zoo.corpora import bible_verses, word_glosses
from research.zoo.examples import Classified, Parts, parted
from research.zoo.problem import Problem
from research.zoo.storage import prepared

__all__ = ["GlossesSkipGram", "VersesHashed"]

_BUCKETS, _MAX_FEATURES = 4096, 48


class VersesHashed(Classified):
    """Which of 66 books of the King James Bible is a verse from? A linear model of hashed words and pairs.

    A feature is a word, or two words that follow each other. Its weights are a row of a table, chosen by a
    hash. The text is that of Debian's ``bible-kjv-text`` (public domain). Verses are held out at random.
    """

    family = "hashed linear model"
    split = "dev"
    num_replicas = 8
    num_steps = 700
    batch_size = 16
    num_examples = 26_702
    learning_rate = 0.1
    loss_unit = "nats per verse"

    @functools.cached_property
    def _verses(self) -> Parts:
        data = prepared("verses_hashed-1", _hash_verses)
        columns = (data["features"].long(), data["books"].long())
        return parted(columns, num_probed=400, num_evaluated=4000)

    def parts(self) -> Parts:
        """Numbers of the features, and books."""
        return self._verses

    def build_model(self, seed: int) -> nn.Module:
        """A table of weights; what is added up are its rows."""
        return _SumOfRows(_BUCKETS, 66)

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Adagrad."""
        return Adagrad(groups, lr=lr)


class _SumOfRows(nn.Module):
    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(num_rows, width)
        nn.init.zeros_(self.table.weight)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, features: Tensor) -> Tensor:
        is_there = (features > 0).unsqueeze(-1)
        return (self.table(features) * is_there).sum(dim=-2) + self.bias


def _hash_verses() -> dict[str, Tensor]:
    """Features of every verse, with 0 for none, and its book; in random order."""
    verses = bible_verses()
    books = {book: i for i, book in enumerate(dict.fromkeys(book for book, _ in verses))}
    features = torch.zeros(len(verses), _MAX_FEATURES, dtype=torch.int16)
    for row, (_, verse) in zip(features, verses, strict=True):
        words = re.findall(r"[a-z]+", verse.lower())
        found = dict.fromkeys([*words, *map(" ".join, itertools.pairwise(words))])
        hashed = [1 + zlib.crc32(feature.encode()) % (_BUCKETS - 1) for feature in found][:_MAX_FEATURES]
        row[: len(hashed)] = torch.tensor(hashed, dtype=torch.int16)
    order = torch.randperm(len(verses), generator=torch.Generator().manual_seed(0))
    of_verses = torch.tensor([books[book] for book, _ in verses], dtype=torch.uint8)
    return {"features": features[order], "books": of_verses[order]}


class GlossesSkipGram(Problem):
    r"""Word vectors: which words stand near a word, and which do not (Mikolov et al., 2013)?

    .. math:: -\log\sigma(u_w \cdot v_c) - \sum_{i=1}^{4} \log\sigma(-u_w \cdot v_{n_i})

    The text is WordNet's glosses (Debian's ``wordnet-base``, WordNet's own free licence). A word :math:`c`
    near :math:`w` is at most three words away. The words :math:`n_i` are drawn from the text at random.
    """

    family = "word vectors"
    split = "dev"
    num_replicas = 2
    num_steps = 1000
    batch_size = 128
    learning_rate = 0.3
    loss_unit = "nats per pair"
    num_words = 2000
    """Size of the vocabulary."""

    def build_model(self, seed: int) -> nn.Module:
        """Two tables of vectors."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return _TwoTables(self.num_words, 24)

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Adagrad."""
        return Adagrad(groups, lr=lr)

    def train_batches(
        self, *, seed: int, replica: int = 0, start: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Random places of the text."""
        text = word_glosses(self.num_words)["train"]
        for step in itertools.count(start):
            yield _words_and_others(text, self.batch_size, batch_generator(seed, replica, step))

    def probe_batch(self) -> tuple[Tensor, Tensor]:
        """Places of glosses that are neither trained nor evaluated on."""
        text = word_glosses(self.num_words)["probe"]
        return _words_and_others(text, 1000, torch.Generator().manual_seed(1))

    def evaluation_batches(self) -> Iterable[tuple[Tensor, Tensor]]:
        """24000 places of held-out glosses."""
        text, generator = word_glosses(self.num_words)["evaluation"], torch.Generator().manual_seed(2)
        return [_words_and_others(text, 4000, generator) for _ in range(6)]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The sum over one near word and four that are drawn, per word."""
        scores = model(batch)
        return (F.softplus(-scores[..., 0]) + F.softplus(scores[..., 1:]).sum(dim=-1)).mean()


class _TwoTables(nn.Module):
    def __init__(self, num_words: int, width: int) -> None:
        super().__init__()
        self.words, self.contexts = nn.Embedding(num_words, width), nn.Embedding(num_words, width)
        nn.init.uniform_(self.words.weight, -0.5 / width, 0.5 / width)  # as word2vec begins
        nn.init.zeros_(self.contexts.weight)

    def forward(self, pairs: tuple[Tensor, Tensor]) -> Tensor:
        words, others = pairs
        return (self.words(words).unsqueeze(-2) * self.contexts(others)).sum(dim=-1)


def _words_and_others(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Words; and for each one that is near, and four that are drawn."""
    places = torch.randint(3, len(text) - 3, (count,), generator=generator)
    distances = torch.randint(1, 4, (count,), generator=generator)
    signs = 2 * torch.randint(2, (count,), generator=generator) - 1
    drawn = torch.randint(len(text), (count, 4), generator=generator)
    chosen = torch.cat([(places + signs * distances).unsqueeze(1), drawn], dim=1)
    return text[places].long(), text[chosen].long()

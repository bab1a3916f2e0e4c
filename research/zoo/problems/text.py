"""Problems on text: three language models, and a classifier of words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from hdet.lab.tasks.task import mean
from hdet.method.fan_out import derived_seed
from research.zoo.corpora import (
    KJV_CHARACTERS,
    LANGUAGES,
    MANUAL_CHARACTERS,
    WORD_CHARACTERS,
    german_manuals,
    king_james_bible,
    word_glosses,
    words_of_languages,
)
from research.zoo.optimizers import MuonAndAdamW
from research.zoo.problem import Problem
from research.zoo.sources import shuffled_epochs
from research.zoo.windows import NextSymbol

__all__ = ["GlossesMixer", "KjvGru", "LanguageConv", "ManualsGpt"]


# --- a recurrent network -------------------------------------------------------------------------


class KjvGru(NextSymbol):
    """A GRU predicts the characters of the King James Bible. Five books are held out, four for the probe."""

    family = "recurrent language model"
    split = "dev"
    num_steps = 800
    batch_size = 4
    length = 24
    learning_rate = 0.02
    clip_norm = 1.0
    weight_decay = 0.01
    can_vectorize = False  # vmap has no rule for nn.GRU
    loss_unit = "nats per character"

    def texts(self) -> dict[str, Tensor]:
        """Characters."""
        return king_james_bible()

    def build_model(self, seed: int) -> nn.Module:
        """One recurrent layer."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return _Recurrent(KJV_CHARACTERS, 32, 64)


class _Recurrent(nn.Module):
    def __init__(self, vocabulary: int, embedded: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedded)
        self.gru = nn.GRU(embedded, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(tokens))
        return self.head(states)


# --- a mixer -------------------------------------------------------------------------------------


class GlossesMixer(NextSymbol):
    """A causal MLP-mixer predicts the words of WordNet's glosses. Matrices inside are trained with Muon."""

    family = "word-level mixer"
    split = "dev"
    num_steps = 500
    batch_size = 4
    length = 16
    learning_rate = 0.3
    loss_unit = "nats per word"

    num_words = 2000

    def texts(self) -> dict[str, Tensor]:
        """Words."""
        return word_glosses(self.num_words)

    def build_model(self, seed: int) -> nn.Module:
        """Two mixer blocks."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return _Mixer(self.num_words, 32, self.length, num_blocks=2)

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """The blocks' matrices, and the rest."""
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            groups[name.startswith("blocks") and parameter.ndim == 2].append(parameter)
        return [
            {"name": "matrices", "params": groups[True], "uses_muon": True},
            {"name": "rest", "params": groups[False], "uses_muon": False},
        ]

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Muon for the matrices, AdamW for the rest."""
        return MuonAndAdamW(groups, lr, weight_decay=self.weight_decay)


class _CausalMix(nn.Module):
    """A linear layer along the window: each position sees itself and those before."""

    past: Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        self.linear = nn.Linear(length, length)
        self.register_buffer("past", torch.ones(length, length).tril(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.linear.weight * self.past, self.linear.bias)


class _MixerBlock(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.positions = nn.Sequential(_CausalMix(length), nn.GELU(), _CausalMix(length))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(self.norm1(x).transpose(-2, -1)).transpose(-2, -1)
        return x + self.channels(self.norm2(x))


class _Mixer(nn.Module):
    def __init__(self, vocabulary: int, width: int, length: int, *, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(_MixerBlock(width, length) for _ in range(num_blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


# --- a transformer -------------------------------------------------------------------------------


class ManualsGpt(NextSymbol):
    """A transformer predicts the characters of German manual pages. Pages are held out by their names."""

    family = "transformer language model"
    split = "dev"
    num_steps = 1200
    batch_size = 2
    length = 32
    learning_rate = 0.02
    clip_norm = 1.0
    weight_decay = 0.1
    loss_unit = "nats per character"

    def texts(self) -> dict[str, Tensor]:
        """Characters."""
        return german_manuals()

    def build_model(self, seed: int) -> nn.Module:
        """Two layers with dropout and without biases."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return _Transformer(MANUAL_CHARACTERS, 32, self.length, num_heads=2, num_blocks=2, dropout=0.1)

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Matrices, which have weight decay, and the norms' vectors, which have none."""
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        return [
            {"name": "matrices", "params": matrices},
            {"name": "vectors", "params": vectors, "weight_decay": 0.0},
        ]


class _TransformerBlock(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(-3, -2).flatten(-2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class _Transformer(nn.Module):
    def __init__(
        self, vocabulary: int, width: int, length: int, *, num_heads: int, num_blocks: int, dropout: float
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(_TransformerBlock(width, num_heads, dropout) for _ in range(num_blocks))
        )
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


# --- a classifier of words -----------------------------------------------------------------------

_NUM_TRAIN, _NUM_PROBE = 30_000, 500  # more than 12 000 remain for evaluation


class LanguageConv(Problem):
    """Which of twenty languages is a word from? A convolution over its letters; no word is in two parts."""

    family = "text classification"
    split = "dev"
    num_steps = 700
    batch_size = 16
    num_examples = _NUM_TRAIN
    learning_rate = 0.2
    weight_decay = 1e-4
    loss_unit = "nats per word"

    def build_model(self, seed: int) -> nn.Module:
        """Two convolutions, the largest response over the word, and a linear layer."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return _WordConv(WORD_CHARACTERS, 32, 64, len(LANGUAGES))

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """SGD with Nesterov's momentum."""
        return SGD(groups, lr=lr, momentum=0.9, nesterov=True, weight_decay=self.weight_decay)

    def train_batches(
        self, *, seed: int, replica: int = 0, start: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled epochs, another order for every replica."""
        epochs = shuffled_epochs(_NUM_TRAIN, self.batch_size, seed=seed, replica=replica, start=start)
        for chosen in epochs:
            yield _words(chosen)

    def probe_batch(self) -> tuple[Tensor, Tensor]:
        """Words that are neither trained nor evaluated on."""
        return _words(slice(_NUM_TRAIN, _NUM_TRAIN + _NUM_PROBE))

    def evaluation_batches(self) -> Iterable[tuple[Tensor, Tensor]]:
        """12288 held-out words."""
        first = _NUM_TRAIN + _NUM_PROBE
        return [_words(slice(first + i * 512, first + (i + 1) * 512)) for i in range(24)]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Loss and accuracy."""
        losses, hits = [], []
        for words, labels in batches:
            logits = model(words)
            losses.append(F.cross_entropy(logits, labels).item())
            hits.append((logits.argmax(dim=1) == labels).float().mean().item())
        return {"loss": mean(losses), "accuracy": mean(hits)}


def _words(rows: Tensor | slice) -> tuple[Tensor, Tensor]:
    data = words_of_languages()
    return data["words"][rows].long(), data["labels"][rows].long()


class _WordConv(nn.Module):
    def __init__(self, vocabulary: int, embedded: int, channels: int, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedded, padding_idx=0)
        self.conv1 = nn.Conv1d(embedded, channels, 3, padding=1)
        self.conv2 = nn.Conv1d(channels, channels, 3, padding=1)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words).transpose(1, 2)
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.head(x.amax(dim=2))

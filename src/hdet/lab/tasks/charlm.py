"""A small GPT on the source text of Python's standard library."""

from __future__ import annotations

import functools
import itertools
import math
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.explore.module_attributes import AttentionScale
from hdet.lab.limits import CountFromZero, Positive, Share, require_hinted
from hdet.lab.tasks.task import Task, batch_generator, mean
from hdet.method.fan_out import derived_seed
from hdet.presets import four_groups

_VOCABULARY = 128  # ASCII; the few other characters become "?"
_MAX_CHARACTERS = 8_000_000


@dataclass(frozen=True, kw_only=True)
class CharLM(Task):
    """Predict the next character of Python's own source text, found on this machine.

    Every twentieth file is held out, half of those for the probe. Windows are drawn at random, and a run sees
    only a small part of the text: data does not repeat, unless ``characters`` says so.

    Args:
        width: of the residual stream.
        num_layers: attention blocks.
        num_heads: attention heads.
        length: characters per window.
        dropout: in every block.
        label_smoothing: of the training loss.
        attention_scale: factor on the attention logits, beside the usual one.
        batch_size: windows per replica and step.
        characters: train on so many characters only, so that a run sees them several times; 0 for all.
        num_evaluation_batches: of 128 windows each.
    """

    width: int = 32
    num_layers: int = 1
    num_heads: int = 2
    length: int = 32
    dropout: Share = 0.0
    label_smoothing: Share = 0.0
    attention_scale: Positive = 1.0
    batch_size: int = 4
    characters: CountFromZero = 0
    num_evaluation_batches: int = 4

    learning_rate = 3e-3
    num_steps = 1000
    loss_unit = "nats per character"

    def __post_init__(self) -> None:
        require_hinted(CharLM, vars(self))
        if 0 < self.characters <= self.length:
            raise ValueError(
                f"characters must be above length={self.length}, or 0 for all, got {self.characters}"
            )
        if self.characters:  # windows side by side; without a limit a run sees a part of the text once
            object.__setattr__(self, "num_examples", self.characters // self.length)
        if self.width % self.num_heads:
            raise ValueError(
                f"width must be a multiple of num_heads={self.num_heads}, got {self.width}: change either"
            )

    def build_model(self, seed: int) -> nn.Module:
        """A decoder, initialised from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            scales = ("dropout", "label_smoothing", "attention_scale")
            sizes = (self.width, self.num_heads, self.num_layers, self.length)
            return GPT(*sizes, **{name: getattr(self, name) for name in scales})

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Embeddings, biases and norms (without weight decay), the output layer, the blocks' matrices."""
        return four_groups(model)

    def train_batches(
        self, *, seed: int, replica: int = 0, start: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Random windows."""
        text = _corpus()[0][: self.characters or None]
        for step in itertools.count(start):
            yield self._windows(text, self.batch_size, batch_generator(seed, replica, step))

    def probe_batch(self) -> tuple[Tensor, Tensor]:
        """Windows of held-out files that are not evaluated on."""
        return self._windows(_corpus()[1], 64, torch.Generator().manual_seed(1))

    def evaluation_batches(self) -> Iterable[tuple[Tensor, Tensor]]:
        """The same windows of held-out files every time."""
        generator = torch.Generator().manual_seed(2)
        return [self._windows(_corpus()[2], 128, generator) for _ in range(self.num_evaluation_batches)]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of the next character; smoothed while training."""
        tokens, targets = batch
        logits, targets = model(tokens).flatten(0, -2), targets.flatten()
        gpt = getattr(model, "module", model)  # under DistributedDataParallel
        assert isinstance(gpt, GPT)
        return gpt.criterion(logits, targets) if model.training else F.cross_entropy(logits, targets)

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Loss in nats, and bits per character."""
        loss = mean([self.loss(model, batch).item() for batch in batches])
        return {"loss": loss, "bits_per_character": loss / math.log(2)}

    def _windows(self, text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - self.length - 1, (count, 1), generator=generator)
        window = text[starts + torch.arange(self.length + 1)].long()
        return window[:, :-1], window[:, 1:]


@functools.lru_cache(maxsize=1)
def _corpus() -> tuple[Tensor, Tensor, Tensor]:
    """Text for training, probe and evaluation, as character codes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not {"test", "tests", "site-packages"} & set(p.parts))
    parts: list[list[bytes]] = [[], [], []]
    total = 0
    for i, file in enumerate(files):
        text = file.read_text(encoding="utf-8", errors="replace").encode("ascii", errors="replace")
        parts[{0: 2, 20: 1}.get(i % 40, 0)].append(text)
        total += len(text)
        if total > _MAX_CHARACTERS:
            break
    if total < 100_000:
        raise ValueError(
            f"task 'charlm' needs the source text of Python's standard library, found {total} characters in "
            f"{root}: install Python with its library sources"
        )
    train, probe, held_out = (bytearray(b"\n".join(part)) for part in parts)
    as_codes = functools.partial(torch.frombuffer, dtype=torch.uint8)
    return as_codes(train), as_codes(probe), as_codes(held_out)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0, attention_scale: float = 1.0) -> None:
        super().__init__()
        self.heads = heads
        self.attention_scale = AttentionScale(attention_scale)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(self.attention_scale(q), k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(-3, -2).flatten(-2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A small decoder; ``scales`` are the dropout and the attention scale of its blocks."""

    def __init__(
        self, width: int, heads: int, layers: int, length: int, label_smoothing: float = 0.0, **scales: float
    ) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        self.token = nn.Embedding(_VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads, **scales) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next character at every position."""
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))

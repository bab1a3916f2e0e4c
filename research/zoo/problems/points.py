"""Points in space: which shape do they come from? And which colour does a photograph have there?"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

from hdet.lab.tasks.task import batch_generator
from hdet.method.fan_out import derived_seed
from research.zoo.examples import Examples, Parts, parted
from research.zoo.problem import Problem
from research.zoo.storage import prepared

__all__ = ["PhotoSiren", "ShapesDeepSets"]

_EXPONENTS = torch.tensor([0.3, 1.0, 2.5])
"""Of superquadrics: nearly square, round, and pinched."""
_NUM_POINTS = 32
_NOISE = 0.2


class ShapesDeepSets(Problem):
    r"""Which of nine superquadrics (Barr, 1981) do 32 noisy points lie on? The order of points means nothing.

    .. math:: x = \cos^a\eta\,\cos^b\omega, \quad y = \cos^a\eta\,\sin^b\omega, \quad z = \sin^a\eta

    with signed powers. Both exponents are 0.3, 1 or 2.5. Among the shapes are a sphere, a cylinder, a box
    and a double pyramid. Each is stretched along its axes and turned about the vertical one. The shapes are
    made as they are needed: data does not repeat.
    """

    family = "point clouds"
    split = "held out"
    num_replicas = 8
    num_steps = 800
    batch_size = 8
    learning_rate = 5e-3
    weight_decay = 0.01
    loss_unit = "nats per shape"

    def build_model(self, seed: int) -> nn.Module:
        """A network for every point, the largest response over the points, and a network for the whole."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return _DeepSet(48, len(_EXPONENTS) ** 2)

    def train_batches(
        self, *, seed: int, replica: int = 0, start: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """New shapes."""
        for step in itertools.count(start):
            yield _shapes(self.batch_size, batch_generator(seed, replica, step))

    def probe_batch(self) -> tuple[Tensor, Tensor]:
        """400 shapes, the same ones every time."""
        return _shapes(400, torch.Generator().manual_seed(1))

    def evaluation_batches(self) -> Iterable[tuple[Tensor, Tensor]]:
        """4096 shapes, the same ones every time."""
        points, classes = _shapes(4096, torch.Generator().manual_seed(2))
        return list(zip(points.split(512), classes.split(512), strict=True))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(model(batch[0]), batch[1])


class _DeepSet(nn.Module):
    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2 * width), nn.ReLU())
        self.whole = nn.Sequential(
            nn.LayerNorm(2 * width), nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, num_classes)
        )

    def forward(self, points: Tensor) -> Tensor:
        return self.whole(self.points(points).amax(dim=-2))


def _shapes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points, and the numbers of their shapes."""
    classes = torch.randint(len(_EXPONENTS) ** 2, (count,), generator=generator)
    angles = torch.rand(2, count, _NUM_POINTS, generator=generator)
    angles = (angles - 0.5) * torch.tensor([math.pi, 2 * math.pi]).view(2, 1, 1)
    powers = _EXPONENTS[torch.stack([classes // 3, classes % 3])].unsqueeze(-1)
    cosines, sines = angles.cos(), angles.sin()
    (up, around), (height, side) = (w.sign() * w.abs() ** powers for w in (cosines, sines))
    points = torch.stack([up * around, up * side, height], dim=-1)
    points = points * (0.7 + 0.6 * torch.rand(count, 1, 3, generator=generator))
    turn = 2 * math.pi * torch.rand(count, 1, generator=generator)
    x, y, z = points.unbind(-1)
    turned = [turn.cos() * x - turn.sin() * y, turn.sin() * x + turn.cos() * y, z]
    points = torch.stack(turned, dim=-1)
    return points + _NOISE * torch.randn(points.shape, generator=generator), classes


_SIDE, _SHRUNK = 300, 3  # pixels of the square that is taken; how many of them, each way, become one
_FREQUENCY = 30.0


class PhotoSiren(Examples):
    r"""The colours of a photograph from the place of a pixel, by a network of sines (Sitzmann et al., 2020).

    .. math:: h_{i+1} = \sin(30\,(W_i h_i + b_i))

    The photograph is the cat of scikit-image (``chelsea.png``, CC0), 100 x 100 pixels of it. Six of ten
    pixels are trained on, over and over. The others lie between them. A mean colour has a loss of one.
    """

    family = "implicit network"
    split = "held out"
    num_replicas = 1
    num_steps = 800
    batch_size = 500
    num_examples = 6000
    learning_rate = 5e-4
    num_at_once = 1200
    loss_unit = "squared error over the variance"

    @functools.cached_property
    def _pixels(self) -> Parts:
        data = prepared("chelsea-1", _read_photograph)
        return parted((data["places"], data["colours"]), num_probed=400, num_evaluated=3600)

    def parts(self) -> Parts:
        """Places from -1 to 1, and colours of unit variance."""
        return self._pixels

    def build_model(self, seed: int) -> nn.Module:
        """Three layers of sines, which begin as in the paper."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return nn.Sequential(_Sines(2, 64, 0.5), _Sines(64, 64), _Sines(64, 64), nn.Linear(64, 3))

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Adam."""
        return Adam(groups, lr=lr)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean squared error."""
        return F.mse_loss(model(batch[0]), batch[1])


class _Sines(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int, bound: float | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_outputs)
        bound = math.sqrt(6 / num_inputs) / _FREQUENCY if bound is None else bound
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(_FREQUENCY * self.linear(x))


def _read_photograph() -> dict[str, Tensor]:
    from importlib.resources import files

    from PIL import Image

    with (files("skimage") / "data" / "chelsea.png").open("rb") as file, Image.open(file) as image:
        square = image.convert("RGB").crop((75, 0, 75 + _SIDE, _SIDE)).reduce(_SHRUNK)
    colours = torch.from_numpy(np.array(square)).flatten(0, 1).float()
    axis = (torch.arange(square.width) + 0.5) / square.width * 2 - 1
    places = torch.cartesian_prod(axis, axis)
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))
    colours = (colours - colours.mean(dim=0)) / colours.std(dim=0)
    return {"places": places[order], "colours": colours[order]}

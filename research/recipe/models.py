"""Models of the recipe's own problems, and losses that draw their own random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "AdditiveModel",
    "AttentionPool",
    "ColumnsTransformer",
    "FactorizationMachine",
    "ResidualMLP",
    "RotaryDecoder",
    "SmallUNet",
    "cell_loss",
    "count_loss",
    "diffusion_loss",
    "flow_loss",
    "group_norm_grid",
    "self_normalizing",
]

Batch = tuple[Tensor, Tensor]


class RotaryDecoder(nn.Module):
    """A language model with RMSNorm, rotary positions and gated layers, as is usual in large ones."""

    def __init__(self, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(128, width)
        self.blocks = nn.ModuleList(_RotaryBlock(width, heads, length) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 128, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next character at every position."""
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _RotaryBlock(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, inner = heads, 8 * width // 3
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(length), 10_000 ** (-torch.arange(half) / half))
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def _turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.get_buffer("turn")[: x.shape[-2]]).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class SmallUNet(nn.Module):
    """Convolutions with BatchNorm to a quarter of the side and back, with what was seen on the way."""

    def __init__(self, num_classes: int, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = _conv(1, width), _conv(width, 2 * width, stride=2)
        self.third = _conv(2 * width, 4 * width, stride=2)
        self.fourth, self.fifth = _conv(6 * width, 2 * width), _conv(3 * width, width)
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes of every pixel."""
        first = self.first(images)
        second = self.second(first)
        x = F.interpolate(self.third(second), scale_factor=2.0)
        x = F.interpolate(self.fourth(torch.cat([x, second], dim=1)), scale_factor=2.0)
        return self.head(self.fifth(torch.cat([x, first], dim=1))).movedim(1, -1)


def _conv(before: int, after: int, stride: int = 1) -> nn.Module:
    convolution = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())


def group_norm_grid(width: int = 24) -> nn.Module:
    """Convolutions with GroupNorm on a torus, one number for each cell."""
    layers: list[nn.Module] = []
    for before in (1, width, width):
        layers += [
            nn.Conv2d(before, width, 3, padding=1, padding_mode="circular"),
            nn.GroupNorm(4, width),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.Conv2d(width, 1, 1))


class ColumnsTransformer(nn.Module):
    """A transformer whose tokens are the columns of a table (Gorishniy et al. 2021)."""

    def __init__(self, num_columns: int, num_classes: int, width: int = 24) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(num_columns, width) / width**0.5)
        self.shift = nn.Parameter(torch.randn(num_columns, width) / width**0.5)
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits of the classes."""
        tokens = rows.unsqueeze(-1) * self.scale + self.shift
        return self.head(self.norm(self.blocks(tokens).mean(dim=1)))


class FactorizationMachine(nn.Module):
    """A vector for each category, their products in pairs, and a network above them (Guo et al. 2017)."""

    def __init__(self, sizes: Sequence[int], num_classes: int, width: int = 24) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        for table in self.tables.parameters():
            nn.init.normal_(table, std=0.1)
        self.pairs = nn.Linear(width, num_classes)
        self.deep = nn.Sequential(nn.Linear(len(sizes) * width, 64), nn.ReLU(), nn.Linear(64, num_classes))

    def forward(self, columns: Tensor) -> Tensor:
        """Logits of the classes."""
        rows = torch.stack([table(columns[:, i]) for i, table in enumerate(self.tables)], dim=1)
        products = (rows.sum(1).square() - rows.square().sum(1)) / 2
        return self.pairs(products) + self.deep(rows.flatten(1))


class AdditiveModel(nn.Module):
    """A small network for each column, and the sum of what they say (Agarwal et al. 2021)."""

    def __init__(self, num_columns: int, width: int = 24) -> None:
        super().__init__()
        inner = num_columns * width
        self.columns = nn.Sequential(
            nn.Conv1d(num_columns, inner, 1, groups=num_columns),
            nn.ReLU(),
            nn.Conv1d(inner, inner, 1, groups=num_columns),
            nn.ReLU(),
            nn.Conv1d(inner, num_columns, 1, groups=num_columns),
        )

    def forward(self, rows: Tensor) -> Tensor:
        """The logarithm of the number that is expected."""
        return self.columns(rows.unsqueeze(-1)).sum(dim=(1, 2))


class AttentionPool(nn.Module):
    """Vectors of a bag, weighed by gated attention, and the class of the bag (Ilse et al. 2018)."""

    def __init__(self, length: int, num_classes: int, width: int = 48) -> None:
        super().__init__()
        self.read = nn.Sequential(nn.Linear(length, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.view, self.gate, self.weigh = nn.Linear(width, 24), nn.Linear(width, 24), nn.Linear(24, 1)
        self.head = nn.Linear(width, num_classes)

    def forward(self, vectors: Tensor) -> Tensor:
        """Logits of the classes."""
        x = self.read(vectors)
        weights = self.weigh(self.view(x).tanh() * self.gate(x).sigmoid()).softmax(dim=1)
        return self.head((weights * x).sum(dim=1))


class ResidualMLP(nn.Module):
    """Residual blocks with LayerNorm between two linear layers."""

    def __init__(self, num_in: int, num_out: int, width: int = 64) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(num_in, width), nn.Linear(width, num_out)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Numbers from numbers."""
        x = self.read(x)
        for block in self.blocks:
            x = x + block(x)
        return self.write(x)


def self_normalizing(*widths: int) -> nn.Module:
    """Linear layers with SELU between them, begun as its authors advise (Klambauer et al. 2017)."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layer = nn.Linear(before, after)
        nn.init.normal_(layer.weight, std=before**-0.5)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.SELU()]
    return nn.Sequential(*layers[:-1])


# --- losses -------------------------------------------------------------------------------------------


def cell_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of yes and no."""
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def count_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Half the deviance of Poisson's distribution, which is never negative."""
    logs, counts = model(batch[0]), batch[1]
    return (logs.exp() - counts * logs + torch.xlogy(counts, counts) - counts).mean()


def flow_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Flow matching (Lipman et al. 2023): time and noise are drawn here."""
    x = batch[0]
    time, noise = torch.rand(len(x), 1), torch.randn_like(x)
    return F.mse_loss(model(torch.cat([time * x + (1 - time) * noise, time], dim=1)), x - noise)


def diffusion_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The error of the noise in noisy images (Ho et al. 2020): time and noise are drawn here."""
    x = batch[0]
    time, noise = torch.rand(len(x), 1), torch.randn_like(x)
    angle = math.pi / 2 * time
    return F.mse_loss(model(torch.cat([angle.cos() * x + angle.sin() * noise, time], dim=1)), noise)

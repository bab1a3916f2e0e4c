"""Small models of several families."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.lab.tasks.charlm import GPT

__all__ = [
    "LoraGPT",
    "PointsGRU",
    "RecurrentLM",
    "ResidualNet",
    "RowsLSTM",
    "SmallMixer",
    "SmallViT",
    "conv_net",
    "conv_net_1d",
    "dropout_mlp",
    "group_norm_net",
    "mlp",
]


def mlp(*widths: int) -> nn.Module:
    """Linear layers of these widths with ReLU between them."""
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def conv_net(num_classes: int, *, width: int, batch_norm: bool) -> nn.Module:
    """Three convolutions over grey images, then one linear layer."""
    layers: list[nn.Module] = []
    for before, after, stride in ((1, width, 2), (width, 2 * width, 2), (2 * width, 2 * width, 1)):
        layers += [nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=not batch_norm)]
        layers += [nn.BatchNorm2d(after), nn.ReLU()] if batch_norm else [nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * width, num_classes))


def conv_net_1d(num_classes: int, width: int = 32) -> nn.Module:
    """Three convolutions with BatchNorm over signals, then one linear layer."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, -1))]
    for before in (1, width, width):
        layers += [
            nn.Conv1d(before, width, 5, stride=2, padding=2, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(5 * width, num_classes))


def group_norm_net(num_classes: int, width: int = 16) -> nn.Module:
    """Three convolutions with GroupNorm over grey images, then one linear layer."""
    layers: list[nn.Module] = []
    for before, after, stride in ((1, width, 2), (width, 2 * width, 2), (2 * width, 2 * width, 1)):
        layers += [nn.Conv2d(before, after, 3, stride=stride, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * width, num_classes))


def dropout_mlp(*widths: int, rate: float = 0.3) -> nn.Module:
    """Linear layers with ReLU and dropout between them."""
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU(), nn.Dropout(rate))]
    return nn.Sequential(nn.Flatten(), *layers[:-2])


class RowsLSTM(nn.Module):
    """A long short-term memory over the rows of grey images."""

    def __init__(self, row: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(row, width, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes, after the last row."""
        return self.head(self.cells(images.squeeze(1))[0][:, -1])


class PointsGRU(nn.Module):
    """A gated recurrent network over the points of a signal, the mean of what it says."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.cells = nn.GRU(1, width, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, signals: Tensor) -> Tensor:
        """Logits of the classes."""
        return self.head(self.cells(signals.unsqueeze(-1))[0].mean(dim=1))


class ResidualNet(nn.Module):
    """A convolution and two residual blocks with BatchNorm over small grey images."""

    def __init__(self, num_classes: int, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes."""
        x = self.first(images)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(dim=(2, 3)))


class SmallMixer(nn.Module):
    """Patches of 7 x 7 pixels, mixed over places and over channels in two blocks."""

    def __init__(self, num_classes: int, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Linear(49, width)
        self.places = nn.ModuleList(mlp_block(16) for _ in range(2))
        self.channels = nn.ModuleList(mlp_block(width) for _ in range(2))
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes."""
        x = self.patches(F.unfold(images, 7, stride=7).transpose(1, 2))
        for places, channels in zip(self.places, self.channels, strict=True):
            x = x + places(x.transpose(1, 2)).transpose(1, 2)
            x = x + channels(x)
        return self.head(x.mean(dim=1))


def mlp_block(width: int) -> nn.Module:
    """A norm and two linear layers, four times as wide between them."""
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )


class RecurrentLM(nn.Module):
    """A recurrent network over characters."""

    def __init__(self, width: int, cells: type[nn.GRU | nn.LSTM] = nn.GRU) -> None:
        super().__init__()
        self.token = nn.Embedding(128, width)
        self.cells = cells(width, width, batch_first=True)
        self.head = nn.Linear(width, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next character at every position."""
        return self.head(self.cells(self.token(tokens))[0])


class SmallViT(nn.Module):
    """Patches of 7 x 7 pixels, two transformer blocks, the mean of what they say."""

    def __init__(self, num_classes: int, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Linear(49, width)
        self.position = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes."""
        patches = F.unfold(images, 7, stride=7).transpose(1, 2)
        return self.head(self.blocks(self.patches(patches) + self.position).mean(dim=1))


class LoraGPT(nn.Module):
    """A trained transformer whose matrices stay, and get a trained product of two thin ones each."""

    def __init__(self, trained: nn.Module, rank: int) -> None:
        super().__init__()
        assert isinstance(trained, GPT)
        self.trained = trained.requires_grad_(False)
        for block in trained.blocks.children():
            for name in ("qkv", "out", "up", "down"):
                setattr(block, name, _Lora(getattr(block, name), rank))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next character at every position."""
        return self.trained(tokens)


class _Lora(nn.Module):
    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.down), self.up) * 2.0

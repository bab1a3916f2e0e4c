"""Signals: a residual convolutional network on MNIST-1D, with more noise than usual."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from hdet.method.fan_out import derived_seed
from research.peers.base import load_package
from research.zoo.examples import Classified, Parts, parted
from research.zoo.storage import prepared

__all__ = ["SignalsResnet"]

_NUM_SIGNALS = 16_400


class SignalsResnet(Classified):
    """Which of ten templates is in a signal of 40 points? It is moved, stretched, sheared and noisy.

    The signals are made by the generator of MNIST-1D (Greydanus and Kobak, 2024; package ``mnist1d``,
    Apache 2.0), with six times its white noise, so that no network is always right.
    """

    family = "residual conv net"
    split = "held out"
    num_replicas = 1
    num_steps = 700
    batch_size = 64
    num_examples = 12_000
    learning_rate = 0.1
    num_at_once = 1000
    weight_decay = 5e-4
    loss_unit = "nats per signal"

    @functools.cached_property
    def _signals(self) -> Parts:
        data = prepared("mnist1d_noisy-2", _make_signals)
        return parted((data["signals"], data["classes"]), num_probed=400, num_evaluated=4000)

    def parts(self) -> Parts:
        """Signals and classes."""
        return self._signals

    def build_model(self, seed: int) -> nn.Module:
        """Three residual blocks with BatchNorm, and a linear layer."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return nn.Sequential(
                nn.Conv1d(1, 16, 5, padding=2, bias=False),
                _Block(16, 16, 1),
                _Block(16, 32, 2),
                _Block(32, 32, 2),
                nn.BatchNorm1d(32),
                nn.ReLU(),
                nn.Flatten(-2),
                nn.Linear(32 * 10, 10),
            )

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """SGD with momentum."""
        return SGD(groups, lr=lr, momentum=0.9, weight_decay=self.weight_decay)


class _Block(nn.Module):
    """Two convolutions, each after BatchNorm and ReLU, beside a shortcut (He et al., 2016)."""

    def __init__(self, channels: int, more: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm1d(channels), nn.BatchNorm1d(more)
        self.conv1 = nn.Conv1d(channels, more, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv1d(more, more, 3, padding=1, bias=False)
        self.shortcut = nn.Conv1d(channels, more, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(F.relu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.relu(self.norm2(inner)))


def _make_signals() -> dict[str, Tensor]:
    module = load_package("mnist1d.data", "zoo")
    arguments = module.get_dataset_args()
    arguments.num_samples, arguments.train_split = _NUM_SIGNALS, 1.0
    arguments.iid_noise_scale *= 6
    with torch.random.fork_rng(devices=[]):
        state = np.random.get_state()  # noqa: NPY002
        made = module.make_dataset(arguments)  # in random order
        np.random.set_state(state)  # noqa: NPY002
    signals = torch.tensor(made["x"], dtype=torch.float32).unsqueeze(1)
    return {"signals": signals, "classes": torch.tensor(made["y"], dtype=torch.long)}

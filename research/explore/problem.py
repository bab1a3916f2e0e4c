"""Problem: a model, its data in three parts, and the optimizer that its users would choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from hdet.method.fan_out import derived_seed
from research.explore.data import Labelled, Parts
from research.zoo.optimizers import MuonAndAdamW
from research.zoo.problem import Split

__all__ = ["Measured", "Problem"]

OptimizerKind = Literal["adamw", "sgd", "muon", "plain sgd"]
"""``"sgd"`` has momentum, ``"plain sgd"`` has none."""
DEFAULT_DECAY = {"adamw": 0.03, "sgd": 5e-4, "muon": 0.03, "plain sgd": 5e-4}
"""What people have where they did not look: decoupled for AdamW and Muon, coupled for SGD."""
_GUESS = {"adamw": 1e-3, "sgd": 0.05, "muon": 0.02, "plain sgd": 5.0}
_NUM_DRAWS = 8
"""How often a loss that draws random numbers is taken of every example that is judged."""


class Measured(NamedTuple):
    """Tells what a model is worth on held-out data."""

    loss: float
    accuracy: float | None
    """None for a regression."""
    scaled_loss: float | None
    """The loss at the best temperature of the logits, which says what is left beside calibration."""


@dataclass(frozen=True)
class Problem:
    """A model, its data and the optimizer that its users would choose."""

    split: Split
    family: str
    """Kind of model on kind of data, in a few words."""
    parts: Callable[[], Parts]
    build: Callable[[Parts], nn.Module]
    """Makes the model for these data; random numbers are seeded outside."""
    optimizer: OptimizerKind = "adamw"
    num_steps: int = 1000
    batch_size: int = 32
    clip_norm: float | None = None
    kind: Literal["classes", "values"] = "classes"
    loss_of: Callable[[nn.Module, Labelled], Tensor] | None = None
    """Takes the place of the loss of the kind; it may draw from torch's random numbers."""

    @property
    def guess(self) -> float:
        """The learning rate that the search starts from."""
        return _GUESS[self.optimizer]

    @property
    def default_decay(self) -> float:
        """The weight decay that people have where they did not look."""
        return DEFAULT_DECAY[self.optimizer]

    @property
    def decays_per_step(self) -> float:
        """The factor from learning rate times weight decay to the share of the weights that a step takes."""
        return 10.0 if self.optimizer == "sgd" else 1.0  # momentum .9 repeats a coupled decay ten times

    def decay_at(self, strength: float, lr: float) -> float:
        """The weight decay of a place in the grid."""
        return float(f"{strength / (lr * self.num_steps * self.decays_per_step):.4g}")

    def model(self, seed: int) -> nn.Module:
        """A new model; the same weights for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "explore model"))
            return self.build(self.parts())

    def optimizer_of(self, model: nn.Module, lr: float, decay: float) -> Optimizer:
        """Build the optimizer of a model."""
        return self.optimizer_over(self.groups(model, decay), lr)

    def groups(self, model: nn.Module, decay: float) -> list[dict[str, Any]]:
        """Matrices decay; biases, norms and tables of embeddings do not."""
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        trained = [p for p in model.parameters() if p.requires_grad]
        decayed = [p for p in trained if p.ndim >= 2 and id(p) not in tables]
        rest = [p for p in trained if p.ndim < 2 or id(p) in tables]
        groups = [{"params": decayed, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
        if self.optimizer != "muon":
            return groups
        groups[0]["params"] = [p for p in decayed if p.ndim == 2]
        groups[0]["uses_muon"] = True
        groups.insert(1, {"params": [p for p in decayed if p.ndim > 2], "weight_decay": decay})
        return [group for group in groups if group["params"]]

    def optimizer_over(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Build the optimizer over groups that say how they decay."""
        if self.optimizer == "muon":
            return MuonAndAdamW(groups, lr=lr)
        if self.optimizer == "adamw":
            return AdamW(groups, lr=lr)
        return SGD(groups, lr=lr, momentum=0.9 if self.optimizer == "sgd" else 0.0)

    def batches(self, seed: int, *, with_probe: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled epochs without end, of the training data, ``with_probe`` also of the probe."""
        parts = self.parts()
        x, y = parts.train
        if with_probe:
            x, y = torch.cat([x, parts.probe[0]]), torch.cat([y, parts.probe[1]])
        generator = torch.Generator().manual_seed(derived_seed(seed, "explore batches"))
        size = min(self.batch_size, len(x))
        while True:
            for chosen in torch.randperm(len(x), generator=generator).split(size):
                if len(chosen) == size:
                    yield x[chosen], y[chosen]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy, the mean square of the error, or the problem's own."""
        if self.loss_of is not None:
            return self.loss_of(model, batch)
        out, y = model(batch[0]), batch[1]
        if self.kind == "values":
            return (out.squeeze(-1) - y).square().mean()
        return F.cross_entropy(out.flatten(0, -2), y.flatten())

    @torch.no_grad()
    def measured(self, model: nn.Module, part: tuple[Tensor, Tensor]) -> Measured:
        """Judge a model on a part of the data, in evaluation mode."""
        if self.loss_of is not None:
            return Measured(self._drawn(self.loss_of, model, part), None, None)
        model.eval()
        outs = torch.cat([model(x) for x in part[0].split(512)])
        model.train()
        if self.kind == "values":
            return Measured((outs.squeeze(-1) - part[1]).square().mean().item(), None, None)
        logits, y = outs.flatten(0, -2), part[1].flatten()
        loss = F.cross_entropy(logits, y).item()
        scaled = min(F.cross_entropy(logits * math.exp(t / 10), y).item() for t in range(-30, 11))
        accuracy = (logits.argmax(-1) == y).float().mean().item()
        return Measured(loss, accuracy, min(loss, scaled))

    def _drawn(
        self, loss_of: Callable[[nn.Module, Labelled], Tensor], model: nn.Module, part: Labelled
    ) -> float:
        """Give the mean of the problem's own loss, with the same random numbers every time."""
        model.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            total = 0.0
            for _ in range(_NUM_DRAWS):
                for x, y in zip(part[0].split(512), part[1].split(512), strict=True):
                    total += loss_of(model, (x, y)).item() * len(x)
        model.train()
        return total / (_NUM_DRAWS * len(part[0]))

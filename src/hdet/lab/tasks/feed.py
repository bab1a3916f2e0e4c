"""Feed: rank a simulated feed (the paper, section 4)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.checks import require_count
from hdet.lab.limits import CountFromZero, Share, require_hinted
from hdet.lab.tasks.feed_ranker import Ranker
from hdet.lab.tasks.feed_world import TARGETS, Events, World
from hdet.lab.tasks.task import Task, batch_generator, evaluation_mode
from hdet.method.fan_out import derived_seed
from hdet.presets import four_groups

NUM_EVALUATION_BATCHES = 8
HELD_OUT_SIZE = 64  # sequences in the probe and in each evaluation batch


@dataclass(frozen=True, kw_only=True)
class Feed(Task):
    """Predict contribution, like and long dwell for each item that a user is shown (the paper, section 4).

    Events come from a simulated year that never repeats (:class:`World`); evaluation and probe are events of
    its last tenth. ``examples/feed_log.py`` derives from it a task with events of a file.

    >>> task = Feed(batch_size=4)
    >>> batch = next(task.train_batches(seed=0))
    >>> batch["item"].shape, task.loss(task.build_model(0), batch).ndim
    (torch.Size([4, 16]), 0)
    """

    batch_size: int = 8
    """Sequences per replica and step."""
    length: Annotated[int, {"at_least": 2, "remedy": "the first event has no history"}] = 16
    """Events in a sequence."""
    width: int = 24
    """Size of embeddings and of the stream between blocks."""
    num_layers: int = 2
    """Attention blocks."""
    num_heads: int = 2
    """Attention heads in a block."""
    num_users: int = 512
    """Rows of the user table; the number of simulated users."""
    num_items: int = 512
    """Rows of the item table; the number of simulated items."""
    dropout: Share = 0.0
    """Share of each block's contribution that is dropped in training."""
    steps_per_year: int = 1000
    """Steps in which the simulated year passes; after it the same year begins anew, with other events."""
    world: CountFromZero = 0
    """Seed of the simulated world."""

    learning_rate = 5e-3
    num_steps = 1000
    loss_unit = "mean binary cross-entropy (nats)"
    metric_notes = MappingProxyType(
        {
            "auc": "the chance that an item with the action is ranked above one without (0.5 is a coin toss)",
            "ne": "normalised entropy, the loss over that of always predicting the average (1 is no better)",
        }
    )

    def __post_init__(self) -> None:
        require_hinted(Feed, vars(self))
        if self.width % self.num_heads:
            raise ValueError(
                f"width must be a multiple of num_heads, got {self.width} with {self.num_heads} heads: "
                f"try {self.num_heads * -(-self.width // self.num_heads)}"
            )
        require_count(
            "num_items", self.num_items, at_least=self.length, remedy="a sequence shows each item once"
        )

    @cached_property
    def _world(self) -> World:
        return World(num_users=self.num_users, num_items=self.num_items, seed=self.world)

    def build_model(self, seed: int) -> Ranker:
        """Build a new ranker."""
        with torch.random.fork_rng(devices=[]):  # torch's modules draw from the caller's generator
            torch.default_generator.manual_seed(derived_seed(seed, "feed model"))
            sizes = ("num_users", "num_items", "length", "width", "num_layers", "num_heads", "dropout")
            return Ranker(**{name: getattr(self, name) for name in sizes})

    def train_batches(self, *, seed: int, replica: int = 0, start: int = 0) -> Iterator[Events]:
        """See :class:`Task`. The time of the simulated year is the step's."""
        for step in itertools.count(start):
            generator = batch_generator(seed, replica, step)
            fraction = torch.rand(self.batch_size, generator=generator)
            times = (step % self.steps_per_year + fraction) / self.steps_per_year
            yield self._world.events(self.batch_size, self.length, times=times, generator=generator)

    def evaluation_batches(self) -> list[Events]:
        """See :class:`Task`: of the last tenth of the year."""
        return [self._held_out("evaluation", i) for i in range(NUM_EVALUATION_BATCHES)]

    def probe_batch(self) -> Events:
        """See :class:`Task`: of the last tenth of the year."""
        return self._held_out("probe", 0)

    def _held_out(self, name: str, index: int) -> Events:
        generator = torch.Generator().manual_seed(derived_seed(self.world, f"feed {name}", index))
        times = 0.9 + 0.1 * torch.rand(HELD_OUT_SIZE, generator=generator)
        return self._world.events(HELD_OUT_SIZE, self.length, times=times, generator=generator)

    def loss(self, model: nn.Module, batch: Events) -> Tensor:
        """Binary cross-entropy, its mean over events and the three actions."""
        losses = F.binary_cross_entropy_with_logits(model(batch), batch["actions"], reduction="none").mean(-1)
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """The paper's four: embedding, no_decay, non_embedding, transformer."""
        return four_groups(model)

    @torch.no_grad()
    def metrics(self, model: nn.Module, batches: Iterable[Events]) -> dict[str, float]:
        """``loss``, ``auc``, ``ne`` (normalised entropy), and each by action, as in ``auc_like``."""
        with evaluation_mode(model):
            events = [(model(batch), batch["actions"], batch["mask"] > 0) for batch in batches]
        logits = torch.cat([logits[is_there] for logits, _, is_there in events])
        labels = torch.cat([labels[is_there] for _, labels, is_there in events])
        return summary(logits, labels)


def auc(scores: Tensor, labels: Tensor) -> float:
    """Compute the chance that a positive scores above a negative; NaN with one class only.

    A tie counts one half. It is exact, from the ranks (Mann-Whitney).

    >>> auc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 1, 0, 1]))
    0.875
    """
    is_positive = labels.flatten() > 0
    num_positive = int(is_positive.sum())
    num_negative = is_positive.numel() - num_positive
    if not (num_positive and num_negative):
        return math.nan
    _, place, counts = torch.unique(scores.flatten(), sorted=True, return_inverse=True, return_counts=True)
    # Ranks count from one; equal scores share the middle of theirs.
    ranks = counts.cumsum(0).double() - (counts - 1).double() / 2
    rank_sum = ranks[place][is_positive].sum().item()
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


def normalized_entropy(loss: float, rate: float) -> float:
    """Divide cross-entropy by that of predicting the base rate always; NaN where the rate is zero or one.

    >>> normalized_entropy(math.log(2) / 2, 0.5)
    0.5
    """
    if not 0 < rate < 1:
        return math.nan
    return loss / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def summary(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute loss, AUC and NE of each target and their means, from two (num_events, 3) matrices.

    The means of AUC and NE are over the targets that have both classes.
    """
    losses = F.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="none").mean(0)
    result = {"loss": losses.mean().item()}
    areas, entropies = {}, {}
    for k, name in enumerate(TARGETS):
        result[f"loss_{name}"] = losses[k].item()
        areas[name] = auc(logits[:, k], labels[:, k])
        entropies[name] = normalized_entropy(losses[k].item(), labels[:, k].double().mean().item())
    for kind, values in (("auc", areas), ("ne", entropies)):
        result |= {f"{kind}_{name}": value for name, value in values.items()}
        known = [value for value in values.values() if not math.isnan(value)]
        result[kind] = math.fsum(known) / len(known) if known else math.nan
    return result

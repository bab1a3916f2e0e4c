"""Trainers: one training step of a task, on virtual replicas or as one rank of many."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

import hdet
from hdet.auto import settings_of
from hdet.core.recipe import Recipe
from hdet.ensemble import Ensemble
from hdet.explore import Hyperparameter
from hdet.run.config import RunConfig
from hdet.tasks.task import Task
from hdet.telemetry import RecordSink

__all__ = ["RankTrainer", "Trainer", "VirtualTrainer", "build_optimizer", "to_device"]


class Trainer(Protocol):
    """What the runner asks of an engine."""

    @property
    def model(self) -> nn.Module:
        """After :meth:`converge`, the mean of the replicas."""
        ...

    @property
    def engine(self) -> Ensemble:
        """What counts steps and moves the base."""
        ...

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        ...

    def step(self) -> Tensor:
        """Train all replicas for one step; the losses seen by this process."""
        ...

    def converge(self) -> None:
        """Average the replicas."""
        ...

    def any_process(self, flag: bool) -> bool:
        """Whether the flag is set in any process. Collective."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that a checkpoint keeps, after :meth:`converge`."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint."""
        ...


def build_optimizer(config: RunConfig, groups: list[dict[str, Any]]) -> Optimizer:
    """The optimizer that the settings name."""
    if config.optimizer == "sgd":
        return SGD(groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    kind = AdamW if config.optimizer == "adamw" else Adam
    return kind(groups, lr=config.lr, weight_decay=config.weight_decay)


def _explored(config: RunConfig, model: nn.Module) -> list[Hyperparameter]:
    # The paper's controller needs a floor; OneCycleLR's is 250 000 times below the peak.
    explore: list[Hyperparameter] = [
        hdet.LearningRate(config.spread, per_group=config.per_group, floor=config.lr / (25 * 1e4))
    ]
    build: dict[str, Callable[[float], Hyperparameter]] = {
        "weight_decay": lambda spread: hdet.WeightDecay(spread, per_group=config.per_group),
        "momentum": lambda spread: hdet.Momentum(spread, per_group=config.per_group),
        "beta2": lambda spread: hdet.Beta2(spread, per_group=config.per_group),
        "epsilon": lambda spread: hdet.Epsilon(spread, per_group=config.per_group),
        "dropout": lambda spread: hdet.Dropout(model, spread=spread),
        "attention_temperature": lambda spread: hdet.AttentionTemperature(model, spread=spread),
        "label_smoothing": lambda spread: hdet.LabelSmoothing(model, spread=spread),
    }
    return explore + [build[name](spread) for name, spread in config.explore.items() if name != "lr"]


def _recipe(config: RunConfig, task: Task) -> Recipe:
    """The recipe that the settings name; a task that does not say how much data it has never repeats it."""
    steps_per_epoch = math.inf
    if task.num_examples is not None and task.batch_size:
        steps_per_epoch = max(1, task.num_examples // (task.batch_size * config.replicas))
    return Recipe(
        total_steps=config.steps,
        steps_per_epoch=steps_per_epoch,
        warmup=config.warmup,
        anneal=config.anneal,
        anneal_to=config.anneal_to,
        average_tail=config.average_tail,
        sync_every=config.sync_every,
        scout=config.scout,
        scout_fraction=config.scout_fraction,
    )


def _settings(
    config: RunConfig, task: Task, optimizer: Optimizer, model: nn.Module, records: RecordSink | None
) -> dict[str, Any]:
    """The recipe, with what the settings change of it."""
    settings = settings_of(_recipe(config, task), optimizer, config.replicas)
    settings |= {"explore": _explored(config, model), "seed": config.seed, "records": records}
    if config.controller == "none":
        settings["controller"] = None
    elif config.controller == "log":
        settings["controller"] = hdet.Controller(form="log", start=config.controller_start)
    elif config.controller == "paper":
        settings["controller"] = hdet.Controller(
            form="paper",
            start=config.controller_start,
            decay="floor",
            temperature="auto" if config.temperature is None else config.temperature,
        )
    return settings


class VirtualTrainer:
    """All replicas in this process. Replicas that do not differ are computed as one, on all their batches."""

    is_main = True

    def __init__(self, task: Task, config: RunConfig, records: RecordSink | None, device: str) -> None:
        self._task, self._config, self._device = task, config, torch.device(device)
        self.model = task.build_model(config.seed).to(self._device)
        optimizer = build_optimizer(config, task.parameter_groups(self.model))
        has_static = bool({"dropout", "attention_temperature", "label_smoothing"} & set(config.explore))
        probe_batch = to_device(self._device, task.probe_batch()) if config.probe else None
        self._ensemble = hdet.VirtualEnsemble(
            self.model,
            optimizer,
            task.loss,
            num_replicas=config.replicas,
            gradients=config.gradients,
            vectorize=task.can_vectorize and not has_static,
            join_equal=True,
            probe=(lambda model: task.loss(model, probe_batch)) if config.probe else None,
            **_settings(config, task, optimizer, self.model, records),
        )
        if config.noise_scale:
            self._ensemble.warm_start(config.noise_scale)
        self.engine = self._ensemble.engine
        self._streams = self._open_streams()

    def _open_streams(self) -> list[Iterator[Any]]:
        return [
            self._task.train_batches(seed=self._config.seed, replica=r, start=self.engine.num_steps)
            for r in range(self._config.replicas)
        ]

    def step(self) -> Tensor:
        """See :class:`Trainer`."""
        return self._ensemble.step([to_device(self._device, _next(stream)) for stream in self._streams])

    def converge(self) -> None:
        """See :class:`Trainer`."""
        self._ensemble.converge()

    def any_process(self, flag: bool) -> bool:
        """See :class:`Trainer`."""
        return flag

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Trainer`."""
        return self._ensemble.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :class:`Trainer`."""
        self._ensemble.load_state_dict(state)
        self._streams = self._open_streams()


class RankTrainer:
    """One replica in this process, as one rank of torch.distributed, which must be running."""

    def __init__(self, task: Task, config: RunConfig, records: RecordSink | None, device: str) -> None:
        self._task, self._config, self._device = task, config, torch.device(device)
        self._rank = dist.get_rank()
        self.is_main = self._rank == 0
        self.model = task.build_model(config.seed).to(self._device)
        self._wrapped = DistributedDataParallel(self.model)
        if config.noise_scale:
            hdet.warm_start(self._wrapped, config.noise_scale, seed=config.seed)
        self._optimizer = build_optimizer(config, task.parameter_groups(self.model))
        probe_batch = to_device(self._device, task.probe_batch()) if config.probe else None
        self.engine = Ensemble(
            self._optimizer,
            model=self._wrapped,
            probe=(lambda: task.loss(self.model, probe_batch)) if config.probe else None,
            **_settings(config, task, self._optimizer, self.model, records if self.is_main else None),
        )
        self._stream = self._open_stream()

    def _open_stream(self) -> Iterator[Any]:
        return self._task.train_batches(
            seed=self._config.seed, replica=self._rank, start=self.engine.num_steps
        )

    def step(self) -> Tensor:
        """See :class:`Trainer`."""
        loss = self._task.loss(self._wrapped, to_device(self._device, _next(self._stream)))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.engine.step(loss)
        return loss.detach().reshape(1)

    def converge(self) -> None:
        """See :class:`Trainer`."""
        self.engine.converge()

    def any_process(self, flag: bool) -> bool:
        """See :class:`Trainer`."""
        flags = torch.tensor([float(flag)], device=self._device)
        dist.all_reduce(flags)
        return bool(flags.item())

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Trainer`."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "engine": self.engine.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :class:`Trainer`."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.engine.load_state_dict(state["engine"])
        self._stream = self._open_stream()


def _next(stream: Iterator[Any]) -> Any:
    try:
        return next(stream)
    except StopIteration:
        raise ValueError("train_batches of the task must never end, but it did: repeat the data") from None


def to_device(device: str | torch.device, batch: Any) -> Any:
    """The batch with all its tensors on the device."""
    if torch.device(device).type == "cpu":
        return batch
    return pytree.tree_map(lambda leaf: leaf.to(device), batch)

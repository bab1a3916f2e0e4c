"""Trainers: one training step of a task, on virtual replicas or as one rank of many."""

from __future__ import annotations

import itertools
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
from hdet.ensemble import Ensemble
from hdet.explore import Hyperparameter
from hdet.lab.tasks.task import Task
from hdet.lab.train.config import RunConfig
from hdet.lab.train.memory import memory_of, require_memory
from hdet.method.recipe import Recipe
from hdet.records import RecordSink
from hdet.replicas.rows import join


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
    def found(self) -> hdet.FoundLR | None:
        """What the search before the run has found, if there was one."""
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
    return explore + [build[name](spread) for name, spread in config.explore.items()]


def _find(
    task: Task, config: RunConfig, model: nn.Module, optimizer: Optimizer, batches: Iterator[Any], device: Any
) -> hdet.FoundLR:
    """The search before the run; on its own generators, so that the run is the same as without it."""
    return hdet.find_lr(
        model,
        optimizer,
        batches,
        task.loss,
        total_steps=config.steps,
        probe=to_device(device, task.probe_batch()) if config.probe else None,
    )


def _settings(
    config: RunConfig,
    optimizer: Optimizer,
    model: nn.Module,
    records: RecordSink | None,
    found: hdet.FoundLR | None,
) -> dict[str, Any]:
    """The recipe, with what the settings change of it."""
    recipe = Recipe(
        total_steps=config.steps,
        warmup=config.warmup,
        anneal=config.anneal,
        anneal_to=config.anneal_to,
        average_tail=config.average_tail,
        sync_every=config.sync_every,
    )
    settings = settings_of(recipe, optimizer, found)
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

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        records: RecordSink | None,
        device: str,
        *,
        searches: bool = False,
    ) -> None:
        self._task, self._config, self._device = task, config, torch.device(device)
        self.model = task.build_model(config.seed).to(self._device)
        require_memory(config, self.model, memory_of(self._device))
        optimizer = build_optimizer(config, task.parameter_groups(self.model))
        self.found = None
        if searches:
            streams = self._open_streams(0)
            batches = (join(self._batches(streams)) for _ in itertools.count())
            self.found = _find(task, config, self.model, optimizer, batches, self._device)
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
            **_settings(config, optimizer, self.model, records, self.found),
        )
        if config.noise_scale:
            self._ensemble.warm_start(config.noise_scale)
        self.engine = self._ensemble.engine
        self._streams = self._open_streams(self.engine.num_steps)

    def _open_streams(self, start: int) -> list[Iterator[Any]]:
        return [
            self._task.train_batches(seed=self._config.seed, replica=r, start=start)
            for r in range(self._config.replicas)
        ]

    def _batches(self, streams: list[Iterator[Any]]) -> list[Any]:
        return [to_device(self._device, _next(stream)) for stream in streams]

    def step(self) -> Tensor:
        """See :class:`Trainer`."""
        return self._ensemble.step(self._batches(self._streams))

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
        self._streams = self._open_streams(self.engine.num_steps)


class RankTrainer:
    """One replica in this process, as one rank of torch.distributed, which must be running."""

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        records: RecordSink | None,
        device: str,
        *,
        searches: bool = False,
    ) -> None:
        self._task, self._config, self._device = task, config, torch.device(device)
        self._rank = dist.get_rank()
        self.is_main = self._rank == 0
        self.model = task.build_model(config.seed).to(self._device)
        self._wrapped = DistributedDataParallel(self.model)
        self._optimizer = build_optimizer(config, task.parameter_groups(self.model))
        self.found = None
        if searches:
            stream = self._open_stream(0)
            batches = (to_device(self._device, _next(stream)) for _ in itertools.count())
            self.found = _find(task, config, self._wrapped, self._optimizer, batches, self._device)
        if config.noise_scale:
            hdet.warm_start(self._wrapped, config.noise_scale, seed=config.seed)
        probe_batch = to_device(self._device, task.probe_batch()) if config.probe else None
        self.engine = Ensemble(
            self._optimizer,
            model=self._wrapped,
            gradients=config.gradients,
            probe=(lambda: task.loss(self.model, probe_batch)) if config.probe else None,
            **_settings(config, self._optimizer, self.model, records if self.is_main else None, self.found),
        )
        self._stream = self._open_stream(self.engine.num_steps)

    def _open_stream(self, start: int) -> Iterator[Any]:
        return self._task.train_batches(seed=self._config.seed, replica=self._rank, start=start)

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
        self.engine.check_state_dict(state["engine"])  # before anything changes
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.engine.load_state_dict(state["engine"])
        self._stream = self._open_stream(self.engine.num_steps)


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

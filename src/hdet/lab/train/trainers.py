"""Trainer: one training step of a task, on virtual replicas or as one rank of many."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.auto import settings_of
from hdet.ensemble import Ensemble
from hdet.explore import Hyperparameter
from hdet.lab.tasks.task import Task
from hdet.lab.train.config import OF_MODELS, RunConfig
from hdet.method.recipe import Anneal, Recipe
from hdet.records import RecordSink
from hdet.replicas.optimizers import peak_rate
from hdet.replicas.rows import join
from hdet.steering.needs import AnyController

_START = {"adamw": 0.03, "sgd": 5e-4}
"""The weight decay that held-out data moves where none is given."""
_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Holds the bytes that a container may use, where it is limited."""


class Trainer:
    """Trains the replicas that are in this process: all of them, or its own as a rank of torch.distributed.

    After :meth:`converge`, ``model`` is the mean of the replicas. ``engine`` counts steps and moves the base.
    ``is_main`` tells whether this process writes the files.

    Args:
        task: what to train on.
        config: the settings.
        records: where the records of the rounds go.
        device: of model and batches.
        searches: find the learning rate first; ``found`` then tells what was found.
    """

    def __init__(
        self, task: Task, config: RunConfig, records: RecordSink | None, device: str, searches: bool = False
    ) -> None:
        self._task = task
        self._config = config
        self._device = torch.device(device)
        self._is_virtual = config.engine == "virtual"
        self._replicas = range(config.replicas) if self._is_virtual else [dist.get_rank()]
        self.is_main = self._replicas[0] == 0
        self.model = task.build_model(config.seed).to(self._device)
        if self._is_virtual:
            require_memory(config, self.model, memory_of(self._device))
        trained = self.model if self._is_virtual else DistributedDataParallel(self.model)
        is_found = "held_out_weight_decay" in config.controllers
        start = config.weight_decay or (_START[config.optimizer] if is_found else 0.0)
        started = replace(config, weight_decay=start)
        optimizer = build_optimizer(started, task.parameter_groups(self.model))
        probe = None
        if config.probe:
            probe = hdet.Probe([to_device(self._device, task.probe_batch())], task.loss)
        self.found = None
        if searches:
            streams = self._open_streams(0)  # of its own, so that the run is the same as without a search
            batches = (join(self._batches(streams)) for _ in itertools.count())
            self.found = hdet.find_lr(
                trained,
                optimizer,
                batches,
                task.loss,
                total_steps=config.steps,
                probe=probe,
                progress=False,  # there is a bar of its own
            )
        settings = _settings(config, optimizer, self.model, self.found)
        settings |= {
            "gradients": config.gradients,
            "records": records if self.is_main else None,
            "probe": probe,
        }
        self._ensemble: hdet.VirtualEnsemble | _RankEnsemble
        if self._is_virtual:
            self._ensemble = hdet.VirtualEnsemble(
                self.model,
                optimizer,
                task.loss,
                num_replicas=config.replicas,
                vectorize=task.can_vectorize and not set(OF_MODELS) & set(config.explore),
                join_equal=True,  # replicas that do not differ are computed as one, on all their batches
                **settings,
            )
            if config.noise_scale:
                self._ensemble.warm_start(config.noise_scale, norm=config.noise_norm)
        else:
            if config.noise_scale:
                hdet.warm_start(trained, config.noise_scale, norm=config.noise_norm, seed=config.seed)
            engine = Ensemble(optimizer, model=trained, **settings)
            self._ensemble = _RankEnsemble(trained, optimizer, task.loss, engine)
        self.engine = self._ensemble.engine
        self._streams = self._open_streams(self.engine.num_steps)

    def _open_streams(self, start: int) -> list[Iterator[Any]]:
        seed = self._config.seed
        return [self._task.train_batches(seed=seed, replica=r, start=start) for r in self._replicas]

    def _batches(self, streams: list[Iterator[Any]]) -> list[Any]:
        try:
            return [to_device(self._device, next(stream)) for stream in streams]
        except StopIteration:
            message = "train_batches of the task must never end, but it did: repeat the data"
            raise ValueError(message) from None

    def step(self) -> Tensor:
        """Train all replicas for one step, and give the losses seen by this process."""
        return self._ensemble.step(batches=self._batches(self._streams))

    def converge(self) -> None:
        """Average the replicas."""
        self._ensemble.converge()

    def any_process(self, flag: bool) -> bool:
        """Tell whether the flag is set in any process. Collective."""
        if self._is_virtual:
            return flag
        flags = torch.tensor([float(flag)], device=self._device)
        dist.all_reduce(flags)
        return bool(flags.item())

    def state_dict(self) -> dict[str, Any]:
        """Everything that a checkpoint keeps, after :meth:`converge`."""
        return self._ensemble.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint, and go on with the batches of its step."""
        self._ensemble.load_state_dict(state)
        self._streams = self._open_streams(self.engine.num_steps)


@dataclass(frozen=True)
class _RankEnsemble:
    """One replica under DDP, with the methods of :class:`hdet.VirtualEnsemble`."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[nn.Module, Any], Tensor]
    engine: Ensemble

    def step(self, *, batches: Sequence[Any]) -> Tensor:
        loss = self.loss(self.model, batches[0])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.engine.step(loss)
        return loss.detach().reshape(1)

    def converge(self) -> None:
        self.engine.converge()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.engine.check_state_dict(state["engine"])  # before anything changes
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Any]:
        return {"model": self.model.module, "optimizer": self.optimizer, "engine": self.engine}


def to_device(device: str | torch.device, batch: Any) -> Any:
    """Put all tensors of a batch on the device."""
    if torch.device(device).type == "cpu":
        return batch
    return pytree.tree_map(lambda leaf: leaf.to(device), batch)


def build_optimizer(config: RunConfig, groups: list[dict[str, Any]]) -> Optimizer:
    """Build the optimizer that the settings name."""
    if config.optimizer == "sgd":
        return SGD(groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    kind = AdamW if config.optimizer == "adamw" else Adam
    return kind(groups, lr=config.lr, weight_decay=config.weight_decay)


def _settings(
    config: RunConfig, optimizer: Optimizer, model: nn.Module, found: hdet.FoundLR | None
) -> dict[str, Any]:
    """Build the recipe, with what the settings change of it."""
    names = ("warmup", "anneal_to", "average_tail", "sync_every")
    anneal: Anneal = "none" if config.anneal == "one_cycle" else config.anneal
    recipe = Recipe(
        total_steps=config.steps, anneal=anneal, **{name: getattr(config, name) for name in names}
    )
    # The guard of the recipe knows what a search expects, and what is beside it.
    named = [name for name in config.controllers if not (config.is_recipe and name == "guard")]
    controllers = [_controller(name, config) for name in named]
    settings = settings_of(recipe, optimizer, found, controllers)
    settings |= {"seed": config.seed, "assignment": config.assignment}
    if config.anneal == "one_cycle":
        peaks = [peak_rate(group) for group in optimizer.param_groups]
        settings["scheduler"] = OneCycleLR(optimizer, peaks, config.steps, pct_start=config.warmup)
    # The paper's controller needs a floor below the peak, which may be found. The division keeps the digits
    # of runs that were made when the floor was always 250 000 times below it.
    floor = [peak_rate(group) / (1 / config.floor) for group in optimizer.param_groups]
    per_group = config.per_group
    explore: list[Hyperparameter] = [hdet.LearningRate(config.spread, per_group=per_group, floor=floor)]
    for name, spread in config.explore.items():
        kind = getattr(hdet, name.title().replace("_", ""))  # weight_decay is hdet.WeightDecay
        explore.append(kind(model, spread=spread) if name in OF_MODELS else kind(spread, per_group=per_group))
    settings["explore"] = explore
    if not config.is_recipe:
        settings["controllers"] = controllers
    return settings


def _controller(name: str, config: RunConfig) -> AnyController:
    if name == "guard":
        return hdet.Guard()
    if name == "thermostat":
        return hdet.Thermostat()
    if name == "held_out_weight_decay":
        return hdet.HeldOutWeightDecay()
    paper: dict[str, Any] = {"end": "floor", "temperature": config.temperature or "auto"}
    return hdet.Controller(
        form="paper" if name == "paper" else "log",
        start=config.controller_start,
        **(paper if name == "paper" else {}),
    )


def memory_of(device: torch.device) -> int | None:
    """Tell the bytes that a device has; None where nobody can."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _LIMIT.read_text().strip() if _LIMIT.is_file() else "max"
    return memory if limit == "max" else min(memory, int(limit))


def require_memory(config: RunConfig, model: nn.Module, memory: int | None) -> None:
    """Raise if the parameters of all replicas and their moments need more memory than there is, in bytes."""
    num_moments = 2 if config.optimizer != "sgd" else int(config.momentum > 0)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    needed = config.replicas * size * (1 + num_moments)
    if memory is not None and needed > memory:
        raise ValueError(
            f"replicas must fit into memory, got {config.replicas}: their parameters and the moments of "
            f"{config.optimizer} take about {needed / 1e9:.3g} GB, and there are {memory / 1e9:.3g} GB. Take "
            "fewer replicas, or a smaller model"
        )

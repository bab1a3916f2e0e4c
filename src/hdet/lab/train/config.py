"""RunConfig: everything that a run is made of."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hdet.checks import require_choice, require_count, require_flag, require_number
from hdet.method.recipe import Recipe
from hdet.search.decisions import LEAST_STEPS

_CHOSEN: Any = None
"""A default that depends on the controller; see :meth:`RunConfig.__post_init__`."""

_FREE = ("engine", "evaluate_every", "find", "name", "replicas")
"""Settings that may change when a run goes on."""

EXPLORABLE = (
    "weight_decay",
    "momentum",
    "beta2",
    "epsilon",
    "dropout",
    "attention_temperature",
    "label_smoothing",
)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of one training; plain values only, so that a folder can keep them as JSON.

    The defaults are those of :class:`hdet.AutoLR`, and of ``hdet run``.

    >>> config = RunConfig(task="quadratic", lr=0.1, steps=1000)
    >>> config.find, config.controller, config.average_tail
    (True, 'guard', 0.075)
    """

    task: str
    """A built-in task or ``path/to/file.py:MyTask``."""
    task_options: dict[str, Any] = field(default_factory=dict)
    lr: float
    """Peak learning rate of the plan."""
    steps: int
    """Optimizer steps."""
    replicas: int = 8
    engine: Literal["virtual", "torchrun"] = "virtual"
    """All replicas in this process, or one process each under torchrun."""
    gradients: Literal["shared", "local"] = "shared"
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    weight_decay: float = 0.0
    momentum: float = 0.9
    """Of SGD."""
    anneal: Literal["linear", "cosine", "none"] = Recipe.anneal
    anneal_to: float = _CHOSEN
    """Share of the peak at which the anneal ends; 0.15 with a tail, else 0."""
    average_tail: float = _CHOSEN
    """Share of the steps, the last ones, whose weights are averaged over time into the final ones; 0.075
    with the guard, else 0."""
    warmup: float = _CHOSEN
    """Share of the steps in which the learning rate rises; 0.4 with the guard, else 0.1."""
    spread: float = _CHOSEN
    """Half-width of the replicas' learning rates around the plan, 0 for equal replicas; 1/9 where a
    controller compares replicas, else 0."""
    per_group: bool = False
    """Whether each parameter group has its own learning-rate factor and correction."""
    explore: dict[str, float] = field(default_factory=dict)
    """Spreads of further hyperparameters."""
    sync_every: int = _CHOSEN
    """Steps per round, T; with the guard fewer than 25 in a short run, and more in a long one, else 25."""
    find: bool = _CHOSEN
    """Find the learning rate before the run, with :func:`hdet.find_lr`; if the run is long enough."""
    controller: Literal["guard", "log", "paper", "none"] = "guard"
    controller_start: int = 0
    """Step from which the controller acts."""
    temperature: float | None = None
    """Softness of the replicas' weights in the paper's controller; None for the spread of their losses."""
    probe: bool = True
    """Compare replicas on one held-out batch, not on their own training losses."""
    noise_scale: float = 0.0
    """Perturb each replica's start by this share of the weights' size (warm start)."""
    seed: int = 0
    evaluate_every: int = 0
    """Steps between evaluations of the averaged model, rounded up to whole rounds; 0 for about 20 of them.
    With as many as there are steps, there is one at the end only."""
    name: str = ""

    def __post_init__(self) -> None:
        require_number("lr", self.lr, above=0)
        require_count("steps", self.steps)
        require_count("replicas", self.replicas)
        require_choice("controller", self.controller, ("guard", "log", "paper", "none"))
        is_guarded, compares = self.controller == "guard", self.controller in ("log", "paper")
        self._choose("warmup", Recipe.warmup if is_guarded else 0.1)
        self._choose("average_tail", Recipe.average_tail if is_guarded else 0.0)
        self._choose("anneal_to", Recipe.anneal_to if self.average_tail else 0.0)
        self._choose("spread", 1 / 9 if compares else 0.0)
        self._choose("sync_every", Recipe(total_steps=self.steps).steps_per_round if is_guarded else 25)
        self._choose("find", self.steps >= LEAST_STEPS)
        require_choice("engine", self.engine, ("virtual", "torchrun"))
        require_choice("gradients", self.gradients, ("shared", "local"))
        require_choice("optimizer", self.optimizer, ("adamw", "adam", "sgd"))
        require_number("weight_decay", self.weight_decay, at_least=0)
        require_number("momentum", self.momentum, at_least=0, below=1)
        require_choice("anneal", self.anneal, ("linear", "cosine", "none"))
        require_number("anneal_to", self.anneal_to, at_least=0, at_most=1)
        require_number("average_tail", self.average_tail, at_least=0, below=1)
        require_number("warmup", self.warmup, at_least=0, below=1)
        require_number("spread", self.spread, at_least=0, below=1)
        require_flag("per_group", self.per_group)
        require_count("sync_every", self.sync_every)
        require_flag("find", self.find)
        require_count("controller_start", self.controller_start, at_least=0)
        if self.temperature is not None:
            require_number("temperature", self.temperature, above=0)
        require_flag("probe", self.probe)
        require_number("noise_scale", self.noise_scale, at_least=0)
        require_count("seed", self.seed, at_least=0)
        require_count("evaluate_every", self.evaluate_every, at_least=0)
        for name, spread in self.explore.items():
            if name == "lr":
                raise ValueError(
                    f"explore must name another hyperparameter than the learning rate, got lr={spread:g}: "
                    f"write --spread {spread:g}"
                )
            require_choice("explore", name, EXPLORABLE)
            if name in ("beta2", "epsilon"):  # on the log scale
                require_number(f"explore {name}", spread, at_least=0)
            else:
                require_number(f"explore {name}", spread, at_least=0, below=1)
        if self.explore and self.controller == "paper":
            raise ValueError(
                "controller must be log, guard or none where more than the learning rate is explored, got "
                f"paper with explore {', '.join(self.explore)}: the paper's controller would let it decay to "
                "nearly zero"
            )
        if self.find and self.steps < LEAST_STEPS:
            raise ValueError(
                f"steps must be at least {LEAST_STEPS} to find the learning rate, got {self.steps}: train "
                "longer, or leave the search out"
            )

    def _choose(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    @property
    def evaluation_interval(self) -> int:
        """Steps between evaluations: whole rounds, because averaging within one changes the run."""
        if self.evaluate_every:
            return self.sync_every * -(-self.evaluate_every // self.sync_every)
        rounds = max(1, self.steps // (20 * self.sync_every))
        return rounds * self.sync_every

    @property
    def slug(self) -> str:
        """A folder name for this run."""
        task = re.sub(r"[^A-Za-z0-9]+", "-", self.task.rpartition(":")[2] or self.task).strip("-").lower()
        return f"{task}-lr{self.lr:g}-seed{self.seed}"

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """What a run that began with the saved settings cannot go on with, each with both values.

        >>> config = RunConfig(task="quadratic", lr=0.1, steps=1000)
        >>> config.differences(config.to_json() | {"optimizer": "sgd", "replicas": 2})
        ["optimizer ('sgd' before, 'adamw' now)"]
        """
        now = json.loads(json.dumps(self.to_json()))
        return [
            f"{name} ({saved[name]!r} before, {value!r} now)"
            for name, value in now.items()
            if name not in _FREE and name in saved and saved[name] != value
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunConfig:
        """The settings of a folder; keys that this version does not know are left out."""
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})

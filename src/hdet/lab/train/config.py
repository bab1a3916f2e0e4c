"""RunConfig: everything that a run is made of."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from hdet.checks import require_choice, require_count, require_flag, require_number
from hdet.method.recipe import Recipe
from hdet.search.decisions import LEAST_STEPS

_CHOSEN: Any = None
"""A default that depends on the controller; see :meth:`RunConfig.__post_init__`."""

_Positive = Annotated[float, {"above": 0}]
_NotNegative = Annotated[float, {"at_least": 0}]
_Share = Annotated[float, {"at_least": 0, "below": 1}]
_CountFromZero = Annotated[int, {"at_least": 0}]

_FREE = ("engine", "evaluate_every", "find", "name", "replicas")
"""Settings that may change when a run goes on."""

OF_MODELS = ("dropout", "attention_temperature", "label_smoothing")
"""Hyperparameters of a model that can be explored, ..."""
EXPLORABLE = ("weight_decay", "momentum", "beta2", "epsilon", *OF_MODELS)
"""... and those of an optimizer."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of one training; plain values only, so that a folder can keep them as JSON.

    They are the options of ``hdet run``, and the first sentences under each are its help.
    The defaults are those of :class:`hdet.AutoLR`, and of ``hdet run``.

    >>> config = RunConfig(task="quadratic", lr=0.1, steps=1000)
    >>> config.find, config.controller, config.average_tail
    (True, 'guard', 0.075)
    """

    task: str
    """feed, charlm, digits, quadratic, or path/to/file.py:MyTask."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task."""
    lr: _Positive
    """Your guess of the learning rate (default: the task's).

    It is the peak of the plan."""
    steps: int
    """Optimizer steps (default: the task's)."""
    replicas: int = 8
    """Number of replicas, N."""
    engine: Literal["virtual", "torchrun"] = "virtual"
    """All replicas in this process, or one process each."""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """adamw, adam or sgd."""
    weight_decay: _NotNegative = 0.0
    """Weight decay."""
    momentum: _Share = 0.9
    """Momentum of sgd."""
    anneal: Literal["linear", "cosine", "none"] = Recipe.anneal
    """Fall after the warm-up: linear, cosine or none."""
    anneal_to: Annotated[float, {"at_least": 0, "at_most": 1}] = _CHOSEN
    """Share of the peak at which the anneal ends (default: 0.15 with a tail, else 0)."""
    average_tail: _Share = _CHOSEN
    """Average the weights over this share of the steps, the last ones (default: 0.075 with the guard, else
    0)."""
    warmup: _Share = _CHOSEN
    """Share of the steps in which the LR rises (default: 0.4 with guard, else 0.1)."""
    spread: _Share = _CHOSEN
    """How far the replicas' LRs reach to both sides of the plan (default: 1/9 with a controller that compares
    replicas, else 0)."""
    per_group: bool = False
    """Give each parameter group a factor of its own."""
    explore: dict[str, float] = field(default_factory=dict)
    """Explore another hyperparameter too: NAME=SPREAD, such as weight_decay=0.5. Repeatable."""
    gradients: Literal["shared", "local"] = "shared"
    """shared: replicas step with the mean. local: each with its own."""
    sync_every: int = _CHOSEN
    """Steps per round, T (default: 25, or by length with the guard).

    With the guard there are fewer than 25 in a short run, and more in a long one."""
    find: bool = _CHOSEN
    """Find the LR by short trials before the run (default: if the run has 50 steps or more).

    See :func:`hdet.find_lr`."""
    controller: Literal["guard", "log", "paper", "none"] = "guard"
    """guard: if the run collapses, go back and lower the LR. log: move the LR by comparing replicas. paper:
    the same by eq. 7. none: follow the plan."""
    controller_start: _CountFromZero = _CHOSEN
    """Step from which the controller acts (default: after the warm-up with paper, which then holds the LR,
    else 0)."""
    floor: Annotated[float, {"above": 0, "at_most": 1}] = 1 / (25 * 1e4)
    """Share of the peak at which the paper's controller ends if replicas do not differ (default: that of
    OneCycleLR)."""
    temperature: float | None = None
    """Temperature of the paper's controller (default: how far losses differ)."""
    probe: bool = True
    """Compare replicas on one held-out batch, not on their training losses."""
    noise_scale: _NotNegative = 0.0
    """Noise on each replica's first weights.

    A share of the weights' size; see :func:`hdet.warm_start`."""
    seed: _CountFromZero = 0
    """Seed of weights, batches and assignments."""
    evaluate_every: _CountFromZero = 0
    """Steps between evaluations. 0 gives about 20 evaluations.

    Rounded up to whole rounds. With as many as there are steps, there is one at the end only."""
    name: str = ""
    """Name in the report (default: the folder's name)."""

    def __post_init__(self) -> None:
        for name, hint in _HINTS.items():
            value = getattr(self, name)
            kind, limits = get_args(hint) if get_origin(hint) is Annotated else (hint, {})
            if value is None and getattr(RunConfig, name, ...) is None:
                continue  # it is chosen below
            if get_origin(kind) is Literal:
                require_choice(name, value, get_args(kind))
            elif kind is bool:
                require_flag(name, value)
            elif kind is int:
                require_count(name, value, **limits)
            elif kind is float:
                require_number(name, value, **limits)
        is_guarded, compares = self.controller == "guard", self.controller in ("log", "paper")
        self._choose("warmup", Recipe.warmup if is_guarded else 0.1)
        self._choose("average_tail", Recipe.average_tail if is_guarded else 0.0)
        self._choose("anneal_to", Recipe.anneal_to if self.average_tail else 0.0)
        self._choose("spread", 1 / 9 if compares else 0.0)
        self._choose("sync_every", Recipe(total_steps=self.steps).steps_per_round if is_guarded else 25)
        self._choose("find", self.steps >= LEAST_STEPS)
        rises_until = math.ceil(self.warmup * self.steps)
        self._choose("controller_start", rises_until if self.controller == "paper" else 0)
        if self.temperature is not None:
            require_number("temperature", self.temperature, above=0)
        for name, spread in self.explore.items():
            if name == "lr":
                raise ValueError(
                    f"explore must name another hyperparameter than the learning rate, got lr={spread:g}: "
                    f"write --spread {spread:g}"
                )
            require_choice("explore", name, EXPLORABLE)
            is_log = name in ("beta2", "epsilon")
            require_number(f"explore {name}", spread, at_least=0, below=math.inf if is_log else 1)
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
        """List what a run that began with the saved settings cannot go on with, each with both values.

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


_HINTS = get_type_hints(RunConfig, include_extras=True)

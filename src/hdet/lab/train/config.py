"""RunConfig: everything that a run is made of."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from hdet.checks import require_choice, require_number
from hdet.lab.limits import CountFromZero, NotNegative, Positive, Share, require_hinted
from hdet.method.recipe import Recipe
from hdet.method.thermostat import LAST, NUM_ROUNDS
from hdet.method.thermostat import LEAST_STEPS as LEAST_STEPS_OF_ROUND
from hdet.search.decisions import LEAST_STEPS

_CHOSEN: Any = None
"""A default that depends on the controller; see :meth:`RunConfig.__post_init__`."""


_FREE = ("engine", "evaluate_every", "find", "name", "replicas")
"""Settings that may change when a run goes on."""

OF_MODELS = ("dropout", "attention_temperature", "label_smoothing")
"""Hyperparameters of a model that can be explored, ..."""
EXPLORABLE = ("weight_decay", "momentum", "beta2", "epsilon", *OF_MODELS)
"""... and those of an optimizer."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of one training; plain values only, so that a folder can keep them as JSON.

    They are the options of ``hdet run``, and the first sentences under each are its help. The defaults are
    those of :class:`hdet.AutoLR`. ``hdet run`` has a spread of 1/9 and a floor of 0.22, as the paper has.

    >>> config = RunConfig(task="quadratic", lr=0.1, steps=1000)
    >>> config.find, config.controller, config.average_tail
    (True, 'guard', 0.075)
    """

    task: str
    """feed, charlm, digits, quadratic, or path/to/file.py:MyTask."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task."""
    lr: Positive
    """Your guess of the peak learning rate (default: the task's)."""
    steps: int
    """Optimizer steps (default: the task's)."""
    replicas: int = 8
    """Number of replicas, N."""
    engine: Literal["virtual", "torchrun"] = "virtual"
    """virtual: all replicas in this process. torchrun: one process each."""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """adamw, adam or sgd."""
    weight_decay: NotNegative = 0.0
    """Weight decay. Where it is found, the start; 0 then means 0.03 (adamw) or 5e-4 (sgd)."""
    momentum: Share = 0.9
    """Momentum of sgd."""
    anneal: Literal["linear", "cosine", "none"] = Recipe.anneal
    """Fall after the warm-up: linear, cosine or none."""
    anneal_to: Annotated[float, {"at_least": 0, "at_most": 1}] = _CHOSEN
    """Share of the peak where the anneal ends (default: 0.15 with a tail, else 0)."""
    average_tail: Share = _CHOSEN
    """Share of the last steps whose weights are averaged (default: 0.075 with the guard, else 0)."""
    warmup: Share = _CHOSEN
    """Share of the steps in which the LR rises (default: 0.4 with the guard, else 0.1)."""
    spread: Share = _CHOSEN
    """Half-width of the replicas' LRs around the shared one; 0 keeps them equal."""
    per_group: bool = False
    """Spread each parameter group by itself."""
    explore: dict[str, float] = field(default_factory=dict)
    """Spread another hyperparameter too: NAME=SPREAD, such as weight_decay=0.5. Repeatable."""
    gradients: Literal["shared", "local"] = "shared"
    """shared: replicas step with the mean gradient. local: each with its own."""
    sync_every: int = _CHOSEN
    """Steps per round, T (default: 25, or by length with the guard).

    With the guard there are fewer than 25 in a short run, and more in a long one."""
    find: bool = _CHOSEN
    """Find the LR by short trials first (default: in runs of 50 steps or more).

    See :func:`hdet.find_lr`."""
    controller: Literal["thermostat", "guard", "log", "paper", "none"] = "guard"
    """thermostat: what averaging gains moves the LR. paper or log: the replicas do (auto-LR). guard: only go
    back after a collapse, as the thermostat does, too. none. (Default: thermostat where it can work.)"""
    controller_start: CountFromZero = _CHOSEN
    """Step from which it acts (default: after the warm-up with paper, else 0)."""
    floor: Annotated[float, {"above": 0, "at_most": 1}] = 1 / (25 * 1e4)
    """Share of the peak that the decay of the paper's controller aims at."""
    temperature: float | None = None
    """Softness of the replicas' weights with paper (default: how far losses differ)."""
    probe: bool = True
    """Compare replicas on one held-out batch, or on their training losses."""
    find_decay: bool = False
    """Let held-out data move the weight decay (default: where data repeats).

    See :meth:`should_find_decay`."""
    noise_scale: NotNegative = 0.0
    """Warm noisy start: noise on each replica's first weights, as a share of their size."""
    seed: CountFromZero = 0
    """Seed of weights, batches and assignments."""
    evaluate_every: CountFromZero = 0
    """Steps between evaluations. 0 gives about 20 evaluations.

    Rounded up to whole rounds. With as many as there are steps, there is one at the end only."""
    name: str = ""
    """Name in the report (default: the folder's name)."""

    def __post_init__(self) -> None:
        chosen = {f.name for f in dataclasses.fields(self) if f.default is None}
        given = {name: value for name, value in vars(self).items() if value is not None or name not in chosen}
        require_hinted(RunConfig, given)
        is_guarded, compares = self.is_guarded, self.controller in ("log", "paper")
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
        if self.find_decay and (why_not := self._why_no_decay_is_found()):
            raise ValueError(why_not)
        if self.controller == "thermostat" and (why_not := self.why_no_thermostat()):
            raise ValueError(why_not)
        if self.find and self.steps < LEAST_STEPS:
            raise ValueError(
                f"steps must be at least {LEAST_STEPS} to find the learning rate, got {self.steps}: train "
                "longer, or leave the search out"
            )

    def _choose(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _why_no_decay_is_found(self) -> str:
        """Name the setting with which the weight decay cannot be found; empty if there is none."""
        spread = self.explore.get("weight_decay")
        what = "to find the weight decay"
        if not self.is_guarded:
            return f"controller must be thermostat or guard {what}, got {self.controller}: leave it out"
        if self.optimizer == "adam":
            return f"optimizer must be adamw or sgd {what}, got adam: it scales the decay with the gradient"
        if not self.probe:
            return f"probe must be True {what}, got False: only held-out data can tell"
        if spread is not None:
            return f"explore must leave weight_decay out {what}, got weight_decay={spread:g}: do one of both"
        return ""

    def why_no_thermostat(self) -> str:
        """Name the setting with which a thermostat cannot work; empty if there is none."""
        what, least = "for the thermostat", LEAST_STEPS_OF_ROUND * NUM_ROUNDS
        if self.steps < least:
            return f"steps must be at least {least} {what}, got {self.steps}: train longer, or leave it out"
        if not self.probe:
            return f"probe must be True {what}, got False: it scores what averaging gains"
        if self.gradients == "local":
            return f"gradients must be shared {what}, got local: leave one of both out"
        if self.warmup < LAST / NUM_ROUNDS:
            return (
                f"warmup must be at least {LAST / NUM_ROUNDS:g} {what}, got {self.warmup:g}: it steers while "
                "the learning rate rises. Leave one of both out"
            )
        if (self.spread or self.explore) and self.sync_every > self.steps // NUM_ROUNDS:
            return (
                f"sync_every must be at most {self.steps // NUM_ROUNDS} {what}, got {self.sync_every}: where "
                "replicas differ, its rounds end at syncs. Leave one of both out"
            )
        return ""

    @property
    def is_guarded(self) -> bool:
        """Tell whether a run goes back after a collapse."""
        return self.controller in ("guard", "thermostat")

    def should_find_decay(self, num_examples: int | None, batch_size: int) -> bool:
        """Tell whether ``hdet run`` finds the weight decay where nobody says.

        It does so in runs that see examples again and are not very short, if other settings let it.

        Args:
            num_examples: of the task's training set; None for a stream.
            batch_size: examples per replica and step; 0 if nobody knows.

        >>> config = RunConfig(task="digits", lr=0.1, steps=100, replicas=2)
        >>> [config.should_find_decay(num_examples, 8) for num_examples in (1000, 10000, None)]
        [True, False, False]
        """
        if num_examples is None or self.steps < LEAST_STEPS or self._why_no_decay_is_found():
            return False
        return not batch_size or self.steps * self.replicas * batch_size > num_examples

    @property
    def evaluation_interval(self) -> int:
        """Count the steps between evaluations: whole rounds, because averaging within one changes the run."""
        if self.evaluate_every:
            return self.sync_every * -(-self.evaluate_every // self.sync_every)
        rounds = max(1, self.steps // (20 * self.sync_every))
        return rounds * self.sync_every

    @property
    def slug(self) -> str:
        """Make a folder name for this run."""
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
        """Give plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunConfig:
        """Read the settings of a folder; keys that this version does not know are left out."""
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})

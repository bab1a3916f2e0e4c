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
from hdet.method.guard import Guard
from hdet.method.recipe import Recipe
from hdet.method.thermostat import LAST, NUM_ROUNDS, Thermostat
from hdet.method.thermostat import LEAST_STEPS as LEAST_STEPS_OF_ROUND
from hdet.method.weight_decay import HeldOutWeightDecay
from hdet.search.decisions import LEAST_STEPS

_CHOSEN: Any = None
"""A default that depends on the controller; see :meth:`RunConfig.__post_init__`."""


_FREE = ("engine", "evaluate_every", "find", "name", "replicas")
"""Settings that may change when a run goes on."""

OF_MODELS = ("dropout", "attention_temperature", "label_smoothing")
"""Hyperparameters of a model that can be explored, ..."""
_KINDS = {"guard": Guard, "thermostat": Thermostat, "held_out_weight_decay": HeldOutWeightDecay}
CONTROLLERS = (*_KINDS, "paper", "log")
"""Names of controllers; those of a comparing one are its forms."""
EXPLORABLE = ("weight_decay", "momentum", "beta2", "epsilon", *OF_MODELS)
"""... and those of an optimizer."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of one training; plain values only, so that a folder can keep them as JSON.

    They are the options of ``hdet run``, and the first sentences under each are its help. The defaults are
    those of :class:`hdet.AutoLR`. ``hdet run`` has a spread of 1/9 and a floor of 0.22, as the paper has.

    >>> config = RunConfig(task="quadratic", lr=0.1, steps=1000)
    >>> config.find, config.controllers, config.average_tail
    (True, ('guard',), 0.075)
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
    controllers: tuple[str, ...] = ("guard",)
    """What steers, with commas between. thermostat: what averaging gains moves the LR.
    held_out_weight_decay: held-out data moves the weight decay. paper or log: the replicas move what is
    spread (auto-LR). guard: goes back after a collapse; the first two have it, too. Or none. (Default:
    thermostat where it can work, and held_out_weight_decay where data repeats.)"""
    controller_start: CountFromZero = _CHOSEN
    """Step from which it acts (default: after the warm-up with paper, else 0)."""
    floor: Annotated[float, {"above": 0, "at_most": 1}] = 1 / (25 * 1e4)
    """Share of the peak that the decay of the paper's controller aims at."""
    temperature: float | None = None
    """Softness of the replicas' weights with paper (default: how far losses differ)."""
    probe: bool = True
    """Compare replicas on one held-out batch, or on their training losses."""
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
        self._join_controllers()
        is_guarded, compares = self.is_recipe, bool({"log", "paper"} & set(self.controllers))
        self._choose("warmup", Recipe.warmup if is_guarded else 0.1)
        self._choose("average_tail", Recipe.average_tail if is_guarded else 0.0)
        self._choose("anneal_to", Recipe.anneal_to if self.average_tail else 0.0)
        self._choose("spread", 1 / 9 if compares else 0.0)
        self._choose("sync_every", Recipe(total_steps=self.steps).steps_per_round if is_guarded else 25)
        self._choose("find", self.steps >= LEAST_STEPS)
        rises_until = math.ceil(self.warmup * self.steps)
        self._choose("controller_start", rises_until if "paper" in self.controllers else 0)

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
        if self.explore and "paper" in self.controllers:
            raise ValueError(
                "controllers must be log, guard or none where more than the learning rate is explored, got "
                f"paper with explore {', '.join(self.explore)}: the paper's controller would let it decay to "
                "nearly zero"
            )
        for name in self.controllers:
            if why_not := self.why_not(name):
                raise ValueError(why_not)
        if self.find and self.steps < LEAST_STEPS:
            raise ValueError(
                f"steps must be at least {LEAST_STEPS} to find the learning rate, got {self.steps}: train "
                "longer, or leave the search out"
            )

    def _choose(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _join_controllers(self) -> None:
        """Check the names of controllers, and add the guard of the recipe."""
        names = () if list(self.controllers) == ["none"] else tuple(self.controllers)
        for name in names:
            require_choice("controllers", name, CONTROLLERS)
        for name in names:
            if names.count(name) > 1 or {"paper", "log"} <= set(names):
                raise ValueError(f"controllers must name each kind once, got {', '.join(names)}")
        has_all = not names or {"guard", "paper", "log"} & set(names)
        object.__setattr__(self, "controllers", names if has_all else ("guard", *names))

    def why_not(self, name: str) -> str:
        """Name the setting with which a controller cannot work; empty if there is none."""
        from hdet.steering.needs import Facts, unmet  # it needs torch

        if name not in _KINDS:
            return ""
        least = LEAST_STEPS_OF_ROUND * NUM_ROUNDS
        if name == "thermostat" and self.steps < least:
            return (
                f"steps must be at least {least} for a Thermostat, got {self.steps}: train longer, or leave "
                "it out"
            )
        if name == "thermostat" and self.warmup < LAST / NUM_ROUNDS:
            return (
                f"warmup must be at least {LAST / NUM_ROUNDS:g} for a Thermostat, got {self.warmup:g}: it "
                "steers while the learning rate rises. Leave one of both out"
            )
        if name == "held_out_weight_decay" and self.optimizer == "adam":
            return (
                "optimizer must be adamw or sgd for a HeldOutWeightDecay, got adam: it scales the decay with "
                "the gradient"
            )
        facts = Facts(
            total_steps=self.steps,
            sync_every=self.sync_every,
            gradients=self.gradients,
            has_probe=self.probe,
            explores=bool(self.spread or self.explore),
            differs_in_decay="weight_decay" in self.explore,
        )
        return next((str(need.error(facts)) for need in unmet(_KINDS[name](), facts)), "")

    @property
    def is_recipe(self) -> bool:
        """Tell whether the run has the schedule of :class:`hdet.AutoLR`: no controller compares."""
        return bool(self.controllers) and not {"paper", "log"} & set(self.controllers)

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
        is_refused = not self.is_recipe or self.why_not("held_out_weight_decay")
        if num_examples is None or self.steps < LEAST_STEPS or is_refused:
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

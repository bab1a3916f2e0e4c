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
from hdet.errors import bad_argument
from hdet.lab.limits import CountFromZero, NotNegative, Positive, Share, require_hinted
from hdet.method.guard import Guard
from hdet.method.recipe import Recipe
from hdet.method.thermostat import LAST, NUM_ROUNDS, Thermostat
from hdet.method.thermostat import LEAST_STEPS as LEAST_STEPS_OF_ROUND
from hdet.method.weight_decay import HeldOutWeightDecay
from hdet.search.decisions import LEAST_STEPS

_CHOSEN: Any = None
"""A default that depends on other settings; see :meth:`RunConfig.__post_init__`."""
_FREE = ("engine", "evaluate_every", "find", "name", "replicas")
"""Settings that may change when a run goes on."""

OF_MODELS = ("dropout", "attention_temperature", "label_smoothing")
"""Hyperparameters of a model that can be explored, ..."""
EXPLORABLE = ("weight_decay", "momentum", "beta2", "epsilon", *OF_MODELS)
"""... and those of an optimizer."""
_KINDS = {"guard": Guard, "thermostat": Thermostat, "held_out_weight_decay": HeldOutWeightDecay}
_REMEDIES = {"explore": "leave weight_decay out of one of both", "probe": "leave --no-probe out"}
"""What to do here where a controller lacks an argument of the library."""
_FORMS = ("paper", "log")
"""Of a controller that compares replicas; each is a name in :attr:`RunConfig.controllers`."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of one training; plain values only, so that a folder can keep them as JSON.

    They are the options of ``hdet run``, and the sentences below are its help. The defaults are those of
    :class:`hdet.AutoLR`. ``hdet run`` has a spread of 1/9 and a floor of 0.22, as the paper has.

    Args:
        task: feed, charlm, digits, quadratic, or path/to/file.py:MyTask.
        task_options: Arguments of the task.
        lr: Your guess of the peak learning rate (default: the task's).
        steps: Optimizer steps (default: the task's).
        replicas: Number of replicas, N. Under torchrun one for each process.
        engine: virtual: all replicas in this process. torchrun: one in each process.
        optimizer: adamw, adam or sgd.
        weight_decay: Weight decay. Where held-out data moves it, the start; 0 then means 0.03 (adamw) or 5e-4
            (sgd).
        momentum: Momentum of sgd.
        anneal: Fall after the warm-up: linear, cosine or none. Or one_cycle, which is torch's OneCycleLR.
        anneal_to: Share of the peak where the anneal ends (default: 0.15 with a tail, else 0).
        average_tail: Share of the last steps whose weights are averaged (default: 0.075 with the guard, else
            0).
        warmup: Share of the steps in which the LR rises (default: 0.4 with the guard, 0.3 with
            one_cycle, else 0.1).
        spread: Half-width of the replicas' LRs around the shared one; 0 keeps them equal.
        per_group: Spread each parameter group by itself.
        explore: Spread another hyperparameter too: NAME=SPREAD, such as weight_decay=0.5. Repeatable.
        gradients: shared: replicas step with the mean gradient. local: each with its own.
        sync_every: Steps per round, T (default: 25, or by length with the guard, which has fewer in a short
            run and more in a long one).
        find: Find the LR by short trials first (default: in runs of 50 steps or more).
        controllers: What steers, with commas between. thermostat: what averaging gains moves the LR.
            held_out_weight_decay: held-out data moves the weight decay. guard: goes back after a collapse; it
            is always beside these two. paper or log: the replicas move what is spread (auto-LR). Or none.
            (Default: guard, thermostat where it can work, and held_out_weight_decay where data repeats.)
        controller_start: Step from which paper or log acts (default: after the warm-up with paper, else 0).
        floor: Share of the peak that the decay of the paper's controller aims at.
        temperature: Softness of the replicas' weights with paper (default: how far losses differ).
        probe: Compare replicas on one held-out batch, or on their training losses.
        noise_scale: Warm noisy start: noise on each replica's first weights, as a share of their size.
        noise_norm: Size of each tensor, or one of all weights: tensor or global.
        assignment: Which replica has which place in the spread: random, in each round anew. paper: the same
            from where the controller starts. latin and factorial: uncorrelated.
        seed: Seed of weights, batches and assignments.
        evaluate_every: Steps between evaluations, rounded up to whole rounds. 0 gives about 20 evaluations.
        name: Name in the report (default: the folder's name).

    >>> config = RunConfig(task="quadratic", lr=0.1, steps=1000)
    >>> config.find, config.controllers, config.average_tail
    (True, ('guard',), 0.075)
    """

    task: str
    task_options: dict[str, Any] = field(default_factory=dict)
    lr: Positive
    steps: int
    replicas: int = 8
    engine: Literal["virtual", "torchrun"] = "virtual"
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    weight_decay: NotNegative = 0.0
    momentum: Share = 0.9
    anneal: Literal["linear", "cosine", "one_cycle", "none"] = Recipe.anneal
    anneal_to: Annotated[float, {"at_least": 0, "at_most": 1}] = _CHOSEN
    average_tail: Share = _CHOSEN
    warmup: Share = _CHOSEN
    spread: Share = _CHOSEN
    per_group: bool = False
    explore: dict[str, float] = field(default_factory=dict)
    gradients: Literal["shared", "local"] = "shared"
    sync_every: int = _CHOSEN
    find: bool = _CHOSEN
    controllers: tuple[str, ...] = ("guard",)
    controller_start: CountFromZero = _CHOSEN
    floor: Annotated[float, {"above": 0, "at_most": 1}] = 1 / (25 * 1e4)
    temperature: float | None = None
    probe: bool = True
    noise_scale: NotNegative = 0.0
    noise_norm: Literal["tensor", "global"] = "tensor"
    assignment: Literal["random", "paper", "latin", "factorial"] = "random"
    seed: CountFromZero = 0
    evaluate_every: CountFromZero = 0
    name: str = ""

    def __post_init__(self) -> None:
        chosen = {f.name for f in dataclasses.fields(self) if f.default is None}
        given = {name: value for name, value in vars(self).items() if value is not None or name not in chosen}
        require_hinted(RunConfig, given)
        self._join_controllers()
        is_guarded, compares = self.is_recipe, not set(_FORMS).isdisjoint(self.controllers)
        rise = 0.3 if self.anneal == "one_cycle" else 0.1
        self._choose("warmup", Recipe.warmup if is_guarded else rise)
        self._choose("average_tail", Recipe.average_tail if is_guarded else 0.0)
        self._choose("anneal_to", Recipe.anneal_to if self.average_tail else 0.0)
        self._choose("spread", 1 / 9 if compares else 0.0)
        self._choose("sync_every", Recipe(total_steps=self.steps).steps_per_round if is_guarded else 25)
        self._choose("find", self.steps >= LEAST_STEPS)
        rises_until = math.ceil(self.warmup * self.steps)
        self._choose("controller_start", rises_until if "paper" in self.controllers else 0)
        if self.temperature is not None:
            require_number("temperature", self.temperature, above=0)
        self._check_explore()
        for name in self.controllers:
            if error := self.error_of(name):
                raise error
        if self.find and self.steps < LEAST_STEPS:
            must = f"must be at least {LEAST_STEPS} to find the learning rate"
            raise bad_argument("steps", must, str(self.steps), "train longer, or leave the search out")

    def _choose(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _join_controllers(self) -> None:
        """Check the names of controllers, and add the guard of the recipe."""
        names = () if list(self.controllers) == ["none"] else tuple(self.controllers)
        for name in names:
            require_choice("controllers", name, (*_KINDS, *_FORMS))
        if len(set(names)) < len(names) or {*_FORMS} <= {*names}:
            raise bad_argument("controllers", "must name each kind once", ", ".join(names))
        has_all = not names or {"guard", *_FORMS} & {*names}
        object.__setattr__(self, "controllers", names if has_all else ("guard", *names))

    def _check_explore(self) -> None:
        for name, spread in self.explore.items():
            if name == "lr":
                must, remedy = (
                    "must name another hyperparameter than the learning rate",
                    f"write --spread {spread:g}",
                )
                raise bad_argument("explore", must, f"lr={spread:g}", remedy)
            require_choice("explore", name, EXPLORABLE)
            is_log = name in ("beta2", "epsilon")
            require_number(f"explore {name}", spread, at_least=0, below=math.inf if is_log else 1)
        if self.explore and "paper" in self.controllers:
            raise bad_argument(
                "controllers",
                "must not hold paper where more than the learning rate is explored",
                f"paper with explore {', '.join(self.explore)}",
                "it would let the other hyperparameter decay to nearly zero. Use log, or leave explore out",
            )

    def error_of(self, name: str) -> Exception | None:
        """Build the error that says why a controller cannot work with these settings; None if it can."""
        from hdet.steering.needs import Facts, unmet  # it needs torch

        if name not in _KINDS:
            return None
        if name == "thermostat":
            least = {"steps": LEAST_STEPS_OF_ROUND * NUM_ROUNDS, "warmup": LAST / NUM_ROUNDS}
            for setting, number in least.items():
                if getattr(self, setting) < number:
                    must, got = f"must be at least {number:g} for a Thermostat", f"{getattr(self, setting):g}"
                    why = "it steers while the learning rate rises. Make that longer, or leave it out"
                    return bad_argument(setting, must, got, why)
        if name == "held_out_weight_decay" and self.optimizer == "adam":
            must, why = (
                "must be adamw or sgd for a HeldOutWeightDecay",
                "it scales the decay with the gradient",
            )
            return bad_argument("optimizer", must, "adam", why)
        facts = Facts(
            total_steps=self.steps,
            sync_every=self.sync_every,
            gradients=self.gradients,
            has_probe=self.probe,
            explores=bool(self.spread or self.explore),
            differs_in_decay="weight_decay" in self.explore,
        )
        for need in unmet(_KINDS[name](), facts):
            return need._replace(remedy=_REMEDIES.get(need.argument, need.remedy)).error(facts)
        return None

    @property
    def is_recipe(self) -> bool:
        """Tell whether the run has the schedule of :class:`hdet.AutoLR`: no controller compares."""
        return bool(self.controllers) and set(_FORMS).isdisjoint(self.controllers)

    @staticmethod
    def of_paper(steps: int) -> dict[str, Any]:
        """Give the settings of the paper for a run of so many steps: those of :func:`hdet.presets.paper`.

        >>> RunConfig(task="charlm", lr=0.01, steps=900, **RunConfig.of_paper(900)).controller_start
        300
        """
        from hdet.presets import paper  # it needs torch

        told = paper(steps)
        return {
            "spread": told["ensemble_lr_spread_ratio"],
            "per_group": True,
            "assignment": told["assignment"],
            "sync_every": told["model_sync_interval"],
            "controllers": ("paper",),
            "controller_start": told["auto_lr_warmup_steps"],
            "temperature": told["loss_scale"],
            "floor": told["end"],
            "noise_scale": 0.01,
            "noise_norm": "global",
            "probe": False,
            "find": False,
            "optimizer": "adam",
            "anneal": "one_cycle",
        }

    def with_usual_controllers(self, num_examples: int | None, batch_size: int) -> RunConfig:
        """Add what steers a ``hdet run`` where nobody says: a thermostat and held-out data, where they can.

        Held-out data moves the weight decay of runs that see examples again and are not very short.

        Args:
            num_examples: of the task's training set; None for a stream.
            batch_size: examples per replica and step; 0 if nobody knows.

        >>> config = RunConfig(task="digits", lr=0.1, steps=100, replicas=2)
        >>> [config.with_usual_controllers(count, 8).controllers[1:] for count in (1000, 10000, None)]
        [('held_out_weight_decay',), (), ()]
        """
        seen = self.steps * self.replicas * (batch_size or math.inf)
        repeats = num_examples is not None and self.steps >= LEAST_STEPS and seen > num_examples
        names = ["thermostat", "held_out_weight_decay"] if repeats else ["thermostat"]
        more = [name for name in names if self.error_of(name) is None]
        return dataclasses.replace(self, controllers=(*self.controllers, *more))

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
        return dataclasses.asdict(self) | {"controllers": list(self.controllers)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunConfig:
        """Read the settings of a folder; keys that this version does not know are left out."""
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})

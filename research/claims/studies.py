"""The studies: which runs each of them takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hdet.lab.ablation import NOISE_SCALE, SPREAD, controller_start, sync_every
from research.compare.ledger import Record

__all__ = ["EXPLORED", "FACTORS", "PRIOR_SEEDS", "STUDIES", "Explored", "exploration_name", "variants"]

_PLAIN = {"spread": 0.0, "controllers": (), "probe": False}
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the values at which full runs are made, on the value that is explored around."""
_EXPLORATION_SPREAD = 0.5
PRIOR_SEEDS = (100, 101)
"""Earlier runs that the group-aware start learns from; no result counts them."""
_MECHANISM_LRS = (0.001, 0.003, 0.01, 0.03, 0.1)


@dataclass(frozen=True)
class Explored:
    """A hyperparameter, the value that replicas are spread around, and where that is set."""

    name: str
    base: float
    option: str
    """Of the task; empty for a setting of the run."""
    needs_probe: bool = False

    @property
    def tunable(self) -> str:
        """Its name in the records."""
        return "attention_scale" if self.name == "attention_temperature" else self.name


EXPLORED = (
    Explored("dropout", 0.1, "dropout"),
    Explored("weight_decay", 0.1, ""),
    Explored("attention_temperature", 1.0, "attention_scale"),
    Explored("label_smoothing", 0.05, "label_smoothing", needs_probe=True),
)


def exploration_name(name: str, how: str) -> str:
    """The variant of a run, in the ledger.

    >>> exploration_name("dropout", "x2")
    'dropout x2'
    """
    return f"{name} {how}"


def _spec(variant: str, lr: float, settings: dict[str, Any], options: dict[str, Any] | None = None) -> Record:
    return {"variant": variant, "lr": lr, "task_options": options or {}, "settings": settings}


def _exploration(steps: int) -> list[Record]:
    """Full runs at several values, and runs that explore around the middle one, on text that repeats."""
    specs = []
    for explored in EXPLORED:
        for factor in FACTORS:
            options, settings = _valued(explored, explored.base * factor)
            specs.append(
                _spec(exploration_name(explored.name, f"x{factor:g}"), 0.02, {**_PLAIN, **settings}, options)
            )
        options, settings = _valued(explored, explored.base)
        for probe in (True,) if explored.needs_probe else (True, False):
            exploring = {
                "spread": 0.0,
                "controllers": ("log",),
                "explore": {explored.name: _EXPLORATION_SPREAD},
                "probe": probe,
                "gradients": "local" if probe else "shared",
                "sync_every": sync_every(steps),
            }
            name = exploration_name(explored.name, "probe" if probe else "own losses")
            specs.append(_spec(name, 0.02, exploring | settings, options))
    return specs


def _valued(explored: Explored, value: float) -> tuple[dict[str, Any], dict[str, Any]]:
    options: dict[str, Any] = {"characters": 20_000}
    if explored.option:
        return options | {explored.option: value}, {}
    return options, {explored.name: value}


def _paper(steps: int, **changes: Any) -> dict[str, Any]:
    return {
        "spread": SPREAD,
        "controllers": ("paper",),
        "controller_start": controller_start(steps),
        "sync_every": sync_every(steps),
        "noise_scale": NOISE_SCALE,
        "per_group": True,
        "probe": False,
        **changes,
    }


def _robustness(steps: int) -> list[Record]:
    """The full method with one setting changed at a time."""
    rounds = sync_every(steps)
    changes: dict[str, dict[str, Any]] = {"as in the paper": {}}
    changes |= {f"spread {s:.3g}": {"spread": s} for s in (SPREAD / 2, 2 * SPREAD, 4 * SPREAD)}
    changes |= {f"T = {t}": {"sync_every": t} for t in (2 * rounds, 5 * rounds, 10 * rounds)}
    changes |= {f"temperature {t:g}": {"temperature": t} for t in (0.002, 0.1, 1.0)}
    rows = [_spec(name, 0.05, _paper(steps, **change)) for name, change in changes.items()]
    return [_spec("plain", 0.05, dict(_PLAIN)), *rows]


def _prior(steps: int) -> list[Record]:
    """The full method with one spread and decay for all groups, and with those that earlier runs give.

    The third one takes the mean of what they give for all groups alike: what is left is owed to the groups.
    """
    seeds = list(PRIOR_SEEDS)
    return [
        _spec("uniform", 0.05, _paper(steps)),
        _spec("from earlier runs", 0.05, _paper(steps, prior_seeds=seeds)),
        _spec("groups alike", 0.05, _paper(steps, prior_seeds=seeds, groups_alike=True)),
    ]


def _mechanism(steps: int) -> list[Record]:
    """Replicas that are spread and not controlled, at several learning rates: what a signal could see."""
    settings = {"spread": SPREAD, "controllers": (), "probe": True, "sync_every": sync_every(steps)}
    return [_spec(f"{lr:g}", lr, dict(settings)) for lr in _MECHANISM_LRS]


STUDIES: dict[str, Callable[[int], Sequence[Record]]] = {
    "exploration": _exploration,
    "robustness": _robustness,
    "prior": _prior,
    "mechanism": _mechanism,
}


def variants(study: str, steps: int) -> list[str]:
    """The variants of a study, in order."""
    return [spec["variant"] for spec in STUDIES[study](steps)]

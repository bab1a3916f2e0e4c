"""The record of one round."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

__all__ = ["RoundRecord", "ScoutDecision", "ScoutRecord"]


@dataclass(frozen=True, kw_only=True)
class ScoutDecision:
    """What the scout decided. Factors are on the planned learning rate."""

    chosen: float
    """Best factor, before the transfer."""
    low: float
    """One standard deviation below it."""
    high: float
    """One standard deviation above it."""
    transfer: float
    """Factor from the trials to the run."""
    factor: float
    """What the run begins with."""
    reason: str = ""
    """Why the decision is not simply the best trial, if it is not."""


@dataclass(frozen=True, kw_only=True)
class ScoutRecord:
    """What one fan of the scout saw: a short trial of every replica, each at its own learning rate."""

    stage: str
    """``"wide"`` or ``"narrow"``."""
    peak_lr: float
    """Learning rate that a factor of one stands for."""
    factors: list[float]
    """Factor of each replica."""
    scores: list[float | None]
    """Score of each replica, the lower the better; None where the trial failed."""
    decision: ScoutDecision | None = None
    """What the scout decided, where this fan was the last one."""


@dataclass(kw_only=True)
class RoundRecord:
    """What one sync saw and decided. Mappings are keyed by the name of the hyperparameter.

    >>> record = RoundRecord(round=0, step=10, num_replicas=2, losses=[0.5, None])
    >>> RoundRecord.from_json(record.to_json()) == record
    True
    """

    round: int
    """Number of the round, from zero."""
    step: int
    """Optimizer steps taken so far."""
    num_replicas: int
    ends_round: bool = True
    """False where parameters were averaged within a round, before a save or an evaluation."""
    losses: list[float | None] = field(default_factory=list)
    """Mean loss of each replica over the round; None where it saw no finite one."""
    probes: list[float | None] = field(default_factory=list)
    """Loss of each replica on the probe; empty if there is none."""
    num_nonfinite_losses: list[int] = field(default_factory=list)
    """Losses of each replica that were left out because they were not finite."""
    excluded: dict[int, str] = field(default_factory=dict)
    """Replicas left out of the weights and of the mean, with the reason."""
    weights: list[float] = field(default_factory=list)
    """Weight of each replica (eq. 4)."""
    temperature: float | None = None
    positions: dict[str, list[float]] = field(default_factory=dict)
    """Where each replica stood in the spread, from -1 to 1."""
    multipliers: dict[str, list[float]] = field(default_factory=dict)
    """Factor of each replica on the base of the round."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """Value of each replica at the last step."""
    signal: dict[str, float] = field(default_factory=dict)
    velocity: dict[str, float] = field(default_factory=dict)
    correction: dict[str, float] = field(default_factory=dict)
    """New base over the planned value."""
    base: dict[str, float] = field(default_factory=dict)
    """Base after the sync, for the first step of the next round."""
    base_trace: dict[str, list[float]] = field(default_factory=dict)
    """Base of every step since the previous record; one entry stands for all if they are equal."""
    num_steps: int = 0
    """Steps since the previous record."""
    converged: bool = False
    """Whether parameters were averaged."""
    scout: ScoutRecord | None = None
    """What the scout saw, where one of its fans ended here; None in the run itself."""
    gate: str = ""
    """Why the anchored controller no longer moves the base, if it does not."""
    num_brakes: int = 0
    """How often it has braked so far, because the training loss jumped up."""
    num_averaged_steps: int = 0
    """At the end of a run whose tail is averaged: how many steps the final weights are the mean of."""
    milliseconds: dict[str, float] = field(default_factory=dict)
    """Time on the host spent in probe, measure, converge and steer."""

    def to_json(self) -> str:
        """One line of JSON."""
        data = vars(self)
        if self.scout is not None:
            data = data | {"scout": asdict(self.scout)}
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RoundRecord:
        """The record of one line; fields that this version does not know are ignored."""
        data = _known(cls, json.loads(text))
        data["excluded"] = {int(replica): why for replica, why in data.get("excluded", {}).items()}
        data["scout"] = _scout(data.get("scout"))
        return cls(**data)


def _scout(data: Any) -> ScoutRecord | None:
    if data is None or data == {}:  # earlier versions wrote an empty object for none
        return None
    if not isinstance(data, dict):
        raise TypeError(f"scout must be an object or null, got {type(data).__name__}")
    decision = data.get("decision")
    if "chosen_factor" in data:  # earlier versions kept the decision beside what was seen
        decision = data | {"chosen": data["chosen_factor"]}
    if decision is not None and not isinstance(decision, dict):
        raise TypeError(f"scout.decision must be an object or null, got {type(decision).__name__}")
    known = _known(ScoutRecord, data)
    known["decision"] = None if decision is None else ScoutDecision(**_known(ScoutDecision, decision))
    return ScoutRecord(**known)


def _known(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in data.items() if name in names}

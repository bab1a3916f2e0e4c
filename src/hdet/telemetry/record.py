"""The record of one round."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["RoundRecord"]


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
    scout: dict[str, Any] = field(default_factory=dict)
    """Where a fan of the scout ended: its ``stage``, ``factors`` on the ``peak_lr`` and ``scores`` of the
    replicas; where it decided, also ``chosen_factor`` with ``low`` and ``high``, ``transfer``, ``factor`` and
    ``reason``."""
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
        return json.dumps(vars(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RoundRecord:
        """The record of one line; fields that this version does not know are ignored."""
        data: dict[str, Any] = json.loads(text)
        known = {f.name for f in fields(cls)}
        data = {name: value for name, value in data.items() if name in known}
        data["excluded"] = {int(replica): why for replica, why in data.get("excluded", {}).items()}
        return cls(**data)

"""The record of one round."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """What :func:`hdet.find_lr` saw and chose, before the run. Learning rates of one parameter group."""

    asked: float
    """What the optimizer had."""
    found: float
    """What the run trains with."""
    low: float
    high: float
    """The best learning rate of a sweep should lie between these in four cases of five."""
    reason: str
    """How it came about, in words."""
    num_steps: int
    """Optimizer steps that the search took."""
    ramp: list[list[float]]
    """Pairs of learning rate and loss, for each step of the ramp."""
    trials: list[list[float | None]]
    """Pairs of learning rate and score, for each trial; None where the loss was not finite."""


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
    merge_weights: list[float] = field(default_factory=list)
    """Share of each replica in what they have merged into; empty where shares are equal."""
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
    search: SearchRecord | None = None
    """What was found before the run, in a record of its own at step 0; None in the run itself."""
    num_brakes: int = 0
    """How often the guard has gone back so far, because the run had collapsed."""
    num_averaged_steps: int = 0
    """At the end of a run whose tail is averaged: how many steps the final weights are the mean of."""
    bytes_sent: int = 0
    """Bytes that this process has put into hdet's collectives since the previous record. What
    DistributedDataParallel sends by itself is not counted."""
    milliseconds: dict[str, float] = field(default_factory=dict)
    """Time on the host spent in probe, measure, converge and steer."""

    def to_json(self) -> str:
        """One line of JSON."""
        data = vars(self)
        if self.search is not None:
            data = data | {"search": asdict(self.search)}
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RoundRecord:
        """The record of one line; fields that this version does not know are ignored."""
        data = _known(cls, json.loads(text))
        data["excluded"] = {int(replica): why for replica, why in data.get("excluded", {}).items()}
        data["search"] = _search(data.get("search"))
        return cls(**data)


def _search(data: Any) -> SearchRecord | None:
    if data is None:
        return None
    if not isinstance(data, dict):
        raise TypeError(f"search must be an object or null, got {type(data).__name__}")
    return SearchRecord(**_known(SearchRecord, data))


def _known(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in data.items() if name in names}

"""RoundRecord: what one round of a run saw and decided, as JSON and as numbers to show."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar


@dataclass(kw_only=True)
class ComparingRecord:
    """Holds what an :class:`hdet.Controller` saw and decided. Mappings are keyed by hyperparameter."""

    name: ClassVar = "comparing"
    weights: list[float] = field(default_factory=list)
    """Weight of each replica (eq. 4)."""
    temperature: float | None = None
    signal: dict[str, float] = field(default_factory=dict)
    velocity: dict[str, float] = field(default_factory=dict)
    limited: dict[str, str] = field(default_factory=dict)
    """Hyperparameters whose move was cut, with what has stopped it."""

    def scalars(self) -> dict[str, float | None]:
        """See :func:`scalars`."""
        found = {
            f"{kind}/{name}": x for kind in ("signal", "velocity") for name, x in getattr(self, kind).items()
        }
        return {**_by_replica("weight", self.weights), **found, "controller/temperature": self.temperature}


@dataclass(kw_only=True)
class GuardRecord:
    """Holds what an :class:`hdet.Guard` has done."""

    name: ClassVar = "guard"
    num_brakes: int = 0
    """It has gone back so often so far, because the run had collapsed."""

    def scalars(self) -> dict[str, float | None]:
        """See :func:`scalars`."""
        return {"guard/num_brakes": self.num_brakes}


@dataclass(kw_only=True)
class WeightDecayRecord:
    """Holds what one look of an :class:`hdet.HeldOutWeightDecay` saw and decided."""

    name: ClassVar = "weight_decay"
    held_out_loss: float | None = None
    """Loss on the probe of the averaged weights."""
    gap: float | None = None
    """Share of it that the training loss has not, over the last looks at the probe."""
    slope: float | None = None
    """By how much the held-out loss rises for each e-fold by which decayed weights shrink."""
    slope_error: float = 0.0
    """Its standard error, by how far parts of the probe differ."""
    move: float = 0.0
    """Of the logarithm of the weight decay."""

    def scalars(self) -> dict[str, float | None]:
        """See :func:`scalars`."""
        return {"held_out/loss": self.held_out_loss, "slope/weight_decay": self.slope}


@dataclass(kw_only=True)
class ThermostatRecord:
    """Holds what an :class:`hdet.Thermostat` saw and decided, for each of its rounds since the last one."""

    name: ClassVar = "thermostat"
    averaging_gains: list[float | None] = field(default_factory=list)
    """What averaging the weights of a round gained on the probe, at the learning rate of the peak; None in
    its first rounds."""
    time_gains: list[float | None] = field(default_factory=list)
    """What an e-fold of steps gained."""
    factors: list[float] = field(default_factory=list)
    """Its factor on the learning rate, after each of these rounds."""

    def scalars(self) -> dict[str, float | None]:
        """See :func:`scalars`."""
        return {f"thermostat/{name}": entries[-1] for name, entries in vars(self).items() if entries}


Section = ComparingRecord | GuardRecord | WeightDecayRecord | ThermostatRecord
_Section = TypeVar("_Section", bound=Section)
_SECTIONS = {kind.name: kind for kind in Section.__args__}


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """Holds what :func:`hdet.find_lr` saw and chose before the run. Learning rates are of one group."""

    asked: float
    """The optimizer had this one."""
    found: float
    """The run trains with this one."""
    low: float
    high: float
    """The best learning rate of a sweep should lie between these in four cases of five."""
    reason: str
    """It says in words how this came about."""
    num_steps: int
    """Optimizer steps that the search took."""
    ramp: list[list[float]]
    """Pairs of learning rate and loss, for each step of the ramp."""
    trials: list[list[float | None]]
    """Pairs of learning rate and score, for each trial; None where the loss was not finite."""


@dataclass(kw_only=True)
class RoundRecord:
    """Holds what one sync saw and decided. Mappings are keyed by the name of the hyperparameter.

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
    merge_weights: list[float] = field(default_factory=list)
    """Share of each replica in what they have merged into; empty where shares are equal."""
    positions: dict[str, list[float]] = field(default_factory=dict)
    """The place of each replica in the spread, from -1 to 1."""
    multipliers: dict[str, list[float]] = field(default_factory=dict)
    """Factor of each replica on the base of the round."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """Value of each replica at the last step."""
    correction: dict[str, float] = field(default_factory=dict)
    """New base over the planned value."""
    controllers: dict[str, Any] = field(default_factory=dict)
    """What each controller saw and decided, by its name; see :meth:`section`."""
    base: dict[str, float] = field(default_factory=dict)
    """Base after the sync, for the first step of the next round."""
    base_trace: dict[str, list[float]] = field(default_factory=dict)
    """Base of every step since the previous record; one entry stands for all if they are equal."""
    num_steps: int = 0
    """Steps since the previous record."""
    converged: bool = False
    """Parameters were averaged."""
    search: SearchRecord | None = None
    """It was found before the run, in a record of its own at step 0; None in the run itself."""
    num_averaged_steps: int = 0
    """At the end of a run whose tail is averaged: how many steps the final weights are the mean of."""
    bytes_sent: int = 0
    """Bytes that this process has put into hdet's collectives since the previous record. What
    DistributedDataParallel sends by itself is not counted."""
    milliseconds: dict[str, float] = field(default_factory=dict)
    """Time on the host spent in probe, measure, converge and steer."""

    def section(self, kind: type[_Section]) -> _Section:
        """Give what a controller saw and decided; an empty section where it has said nothing.

        >>> RoundRecord(round=0, step=10, num_replicas=2).section(GuardRecord).num_brakes
        0
        """
        return self.controllers.get(kind.name) or kind()

    def counted(self, numbers: Sequence[float | None]) -> dict[int, float]:
        """Give those of ``losses`` or ``probes`` that count, by replica.

        >>> RoundRecord(round=0, step=10, num_replicas=3, excluded={2: "late"}).counted([0.5, None, 0.4])
        {0: 0.5}
        """
        return {r: x for r, x in enumerate(numbers) if x is not None and r not in self.excluded}

    def to_json(self) -> str:
        """Write one line of JSON."""
        return json.dumps(vars(self), default=vars, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RoundRecord:
        """Read the record of one line; fields that this version does not know are ignored."""
        data = _known(cls, json.loads(text))
        data["excluded"] = {int(replica): why for replica, why in data.get("excluded", {}).items()}
        search = data.get("search")
        if search is not None:
            if not isinstance(search, dict):
                raise TypeError(f"search must be an object or null, got {type(search).__name__}")
            data["search"] = SearchRecord(**_known(SearchRecord, search))
        sections = data.get("controllers", {})
        if not isinstance(sections, dict):
            raise TypeError(f"controllers must be an object, got {type(sections).__name__}")
        data["controllers"] = {
            name: kind(**_known(kind, sections[name])) for name, kind in _SECTIONS.items() if name in sections
        }
        return cls(**data)


def _known(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in data.items() if name in names}


def is_learning_rate(name: str) -> bool:
    """Tell if a name in a record stands for a learning rate, of all parameter groups or of one.

    The first field is ``lr``, one of a group is ``lr.GROUP``, and further fields are ``lr[1]``, ``lr[2]``.

    >>> [is_learning_rate(name) for name in ("lr", "lr.embedding", "lr[1]", "lr.body[1]")]
    [True, True, True, True]
    >>> [is_learning_rate(name) for name in ("lr_floor", "lrs", "lr[x]", "weight_decay.lr")]
    [False, False, False, False]
    """
    return re.fullmatch(r"lr(\..*)?(\[\d+\])?", name, re.DOTALL) is not None


def scalars(record: RoundRecord) -> dict[str, float]:
    """Pick what every tracker shows of a record: finite numbers, by names of the form ``kind/which``.

    What a replica did not see (a loss of None) and what is not finite is left out.

    >>> scalars(RoundRecord(round=0, step=10, num_replicas=2, losses=[0.5, None], base={"lr": 0.1}))
    {'loss/mean': 0.5, 'loss/replica_0': 0.5, 'base/lr': 0.1, 'replicas/excluded': 0.0}
    """
    found: dict[str, float | None] = {}
    for kind, numbers in (("loss", record.losses), ("probe", record.probes)):
        seen = [x for x in numbers if x is not None]
        if seen:
            found[f"{kind}/mean"] = math.fsum(seen) / len(seen)
        found |= _by_replica(kind, numbers)
    for section in record.controllers.values():
        found |= section.scalars()
    for kind in ("base", "correction", "milliseconds"):
        found |= {f"{kind}/{name}": number for name, number in getattr(record, kind).items()}
    found["replicas/excluded"] = len(record.excluded)
    if record.num_nonfinite_losses:
        found["nonfinite/total"] = sum(record.num_nonfinite_losses)
        found |= _by_replica("nonfinite", record.num_nonfinite_losses)
    return {name: float(x) for name, x in found.items() if x is not None and math.isfinite(x)}


def _by_replica(kind: str, numbers: Sequence[float | None]) -> dict[str, float | None]:
    return {f"{kind}/replica_{r}": number for r, number in enumerate(numbers)}


def problem_of(record: RoundRecord | SearchRecord | Section, prefix: str = "") -> str:
    """Name the first field that does not hold what its type says; empty if all do.

    >>> problem_of(RoundRecord(round=0, step=-10, num_replicas=2))
    'step must be a whole number'
    """
    for f in fields(record):
        holds, rule = _KINDS[f.type]
        if not holds(getattr(record, f.name)):
            return f"{prefix}{f.name} must be {rule}"
    if not isinstance(record, RoundRecord):
        return ""
    parts = {**record.controllers, **({} if record.search is None else {"search": record.search})}
    return next(filter(None, (problem_of(part, f"{name}.") for name, part in parts.items())), "")


def _is_number(value: object) -> bool:
    # An integer may be too large for any float.
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**1023)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number_or_null(value: object) -> bool:
    return value is None or _is_number(value)


def _is_list(value: object, holds: Callable[[object], bool] = _is_number) -> bool:
    return isinstance(value, list) and all(map(holds, value))


def _are_pairs(value: object, holds: Callable[[object], bool] = _is_number) -> bool:
    return isinstance(value, list) and all(
        _is_list(pair, holds) and len(pair) == 2 and pair[0] is not None for pair in value
    )


def _is_mapping(value: object, holds: Callable[[object], bool] = _is_number) -> bool:
    return isinstance(value, Mapping) and all(map(holds, value.values()))


_KINDS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (lambda value: type(value) is int and 0 <= value < 2**53, "a whole number"),
    "float": (_is_number, "a number"),
    "float | None": (_is_number_or_null, "a number or null"),
    "str": (_is_text, "text"),
    "list[int]": (_is_list, "a list of numbers"),
    "list[float]": (_is_list, "a list of numbers"),
    "list[float | None]": (lambda value: _is_list(value, _is_number_or_null), "a list of numbers or null"),
    "list[list[float]]": (_are_pairs, "pairs of numbers"),
    "list[list[float | None]]": (
        lambda value: _are_pairs(value, _is_number_or_null),
        "pairs of numbers, the second of them or null",
    ),
    "dict[int, str]": (lambda value: _is_mapping(value, _is_text), "reasons"),
    "dict[str, str]": (lambda value: _is_mapping(value, _is_text), "reasons"),
    "dict[str, Any]": (lambda value: isinstance(value, dict), "sections by name"),
    "dict[str, float]": (_is_mapping, "numbers by name"),
    "dict[str, list[float]]": (lambda value: _is_mapping(value, _is_list), "lists of numbers by name"),
    "SearchRecord | None": (lambda _: True, "what a search saw"),
}
"""Says what a field of each type may hold, as a check and in words. Types are as the classes write them."""

"""Hyperparameters of the optimizer: slots of its parameter groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import require_flag, require_number
from hdet.errors import NoEffectWarning, warn
from hdet.explore.hyperparameter import Spreading, read_number
from hdet.explore.slots import FloatSlot, FunctionSlot, Slot, TensorSlot
from hdet.explore.tunable import Tunable


@dataclass(frozen=True, eq=False)
class OptimizerField(Spreading):
    """Mechanism of the members below: one slot of the parameter groups, on its own or together."""

    per_group: bool = True
    """Each parameter group on its own, or one multiplier and one correction for all of them."""

    group_spreads: Sequence[float] | None = None
    """A spread for each parameter group, in place of one for all; see :func:`hdet.prior_from`."""

    floor: float | Sequence[float] | None = None
    """Where ``Controller(decay="floor")`` takes the base by the end; one for all groups, or one each."""

    name: ClassVar[str] = ""
    keys: ClassVar[tuple[tuple[str, int | None], ...]] = ()
    """Where to look, in this order: a key of the group, and an index if it holds a tuple."""
    is_complement: ClassVar[bool] = False
    skips_zero: ClassVar[bool] = False
    """Groups that hold a zero are left alone."""
    is_scheduled: ClassVar[bool] = False
    """A zero is only where the schedule begins."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_flag("per_group", self.per_group)
        if self.group_spreads is not None:
            object.__setattr__(self, "group_spreads", tuple(self.group_spreads))
            if not self.per_group:
                raise ValueError(
                    "group_spreads must be None where per_group is False, got "
                    f"{self.group_spreads}: leave out either"
                )
            for i, spread in enumerate(self.group_spreads):
                self._require_spread(f"group_spreads[{i}]", spread)
        if isinstance(self.floor, Sequence):
            object.__setattr__(self, "floor", tuple(self.floor))  # so that equal settings read alike
        for floor in self.floor if isinstance(self.floor, Sequence) else [self.floor]:
            if floor is not None:
                require_number("floor", floor, above=0)

    def tunables(self, optimizer: Optimizer) -> list[Tunable]:
        """One tunable per parameter group that has the slot, or a single one."""
        groups = optimizer.param_groups
        floors = _one_each("floor", self.floor, len(groups))
        spread = self.spread if self.group_spreads is None else self.group_spreads
        spreads = _one_each("group_spreads", spread, len(groups))
        found = [(i, self._slot(optimizer, i)) for i in range(len(groups))]
        slots = [(i, slot) for i, slot in found if slot is not None]
        if not slots:
            looked_for = " or ".join(repr(key) for key, _ in self.keys) + " above zero" * self.skips_zero
            warn(
                f"{type(self).__name__} found no {looked_for} in the groups of {type(optimizer).__name__}: "
                "nothing is explored",
                NoEffectWarning,
            )
            return []
        told = {"is_scheduled": self.is_scheduled}
        if not self.per_group:
            return [self._tunable(self.name, [slot for _, slot in slots], floor=floors[0], **told)]
        names = _group_names(self.name, optimizer)
        return [
            self._tunable(names[i], [slot], spread=spreads[i], floor=floors[i], **told) for i, slot in slots
        ]

    def _slot(self, optimizer: Optimizer, index: int) -> Slot | None:
        group = optimizer.param_groups[index]
        key, place = next(((key, place) for key, place in self.keys if key in group), ("", None))
        if not key:
            return None
        value = group[key] if place is None else group[key][place]
        where = f"{self.name} of group {index}"
        is_plain = place is None and not self.is_complement
        if isinstance(value, Tensor) and is_plain:
            if value.numel() != 1 or not value.is_floating_point():
                raise TypeError(f"{where} must hold one float to be explored, got {value!r}")
            return TensorSlot(optimizer, index, key, self.bounds)
        value = read_number(where, float(value) if isinstance(value, Tensor) or value == 0 else value)
        if value == 0 and self.skips_zero:
            return None
        if is_plain and self.bounds is None:
            return FloatSlot(optimizer, index, key)

        def get() -> float:
            held = optimizer.param_groups[index][key]
            return float(held if place is None else held[place])

        def put(group: dict[str, Any], value: float) -> None:
            group[key] = value if place is None else (*group[key][:place], value, *group[key][place + 1 :])

        return FunctionSlot(
            get,
            lambda value: put(optimizer.param_groups[index], value),
            is_complement=self.is_complement,
            save=lambda state, value: put(state["param_groups"][index], value),
            group_index=index,
            column=key if place is None else f"beta{place + 1}",
            bounds=self.bounds,
        )


def _one_each(name: str, given: Any, num_groups: int) -> list[Any]:
    """One entry for each parameter group: those that are given, or one for all."""
    each = list(given) if isinstance(given, Sequence) else [given] * num_groups
    if len(each) != num_groups:
        raise ValueError(
            f"{name} must have one entry per parameter group, got {len(each)} for {num_groups} groups"
        )
    return each


def _group_names(name: str, optimizer: Optimizer) -> list[str]:
    """The bare name for a single group, else ``name.GROUP`` with the group's own name or its index."""
    groups = optimizer.param_groups
    if len(groups) == 1:
        return [name]
    names = [f"{name}.{group.get('name', i)}" for i, group in enumerate(groups)]
    return names if len(set(names)) == len(names) else [f"{name}.{i}" for i in range(len(groups))]


@dataclass(frozen=True, eq=False)
class LearningRate(OptimizerField):
    """Explore the learning rate.

    >>> LearningRate(spread=1.2)
    Traceback (most recent call last):
    ValueError: spread must be a number in [0, 1), got 1.2: use scale='log' for a wider range
    """

    name = "lr"
    keys = (("lr", None),)
    is_scheduled = True


@dataclass(frozen=True, eq=False)
class WeightDecay(OptimizerField):
    """Explore the weight decay; groups that have none (zero) are left alone."""

    spread: float = 0.5

    name = "weight_decay"
    keys = (("weight_decay", None),)
    skips_zero = True


@dataclass(frozen=True, eq=False)
class Momentum(OptimizerField):
    """Explore the momentum of SGD or beta1 of Adam, as one minus it: 0.9 with spread 0.5 is 0.85 to 0.95."""

    spread: float = 0.3
    bounds: tuple[float, float] | None = (0.0, 1.0)

    name = "momentum"
    keys = (("momentum", None), ("betas", 0))
    is_complement = True


@dataclass(frozen=True, eq=False)
class Beta2(OptimizerField):
    """Explore beta2 of Adam, as one minus it: 0.999 with spread 1 on the log scale is 0.998 to 0.9995."""

    spread: float = 0.5
    scale: Literal["linear", "log"] = "log"
    bounds: tuple[float, float] | None = (0.0, 1.0)

    name = "beta2"
    keys = (("betas", 1),)
    is_complement = True


@dataclass(frozen=True, eq=False)
class Epsilon(OptimizerField):
    """Explore the epsilon of Adam, on the log scale."""

    spread: float = 9.0
    scale: Literal["linear", "log"] = "log"

    name = "epsilon"
    keys = (("eps", None),)

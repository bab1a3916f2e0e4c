"""Hyperparameters that a user asks to explore: those of the optimizer, any scalar, and their base."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import is_list, require_choice, require_flag, require_kind, require_number
from hdet.errors import NoEffectWarning, warn
from hdet.explore.slots import FloatSlot, FunctionSlot, Slot, TensorSlot
from hdet.explore.tunable import Tunable


class Hyperparameter(Protocol):
    """Is asked for by a user: it knows how to turn itself into tunables."""

    @property
    def spread(self) -> float:
        """Half-width of the multipliers; zero explores nothing."""
        ...

    def tunables(self, optimizer: Optimizer) -> list[Tunable]:
        """The tunables of this hyperparameter, one for each value that is explored on its own."""
        ...


@dataclass(frozen=True, eq=False)
class Spreading:
    """Base of all hyperparameters: how far replicas differ."""

    spread: float = 1 / 9
    """Half-width of the multipliers, as a share of the base. Linear: from 1 - spread to 1 + spread. Log:
    from 1 / (1 + spread) to 1 + spread."""

    scale: Literal["linear", "log"] = "linear"
    """Multipliers evenly spaced as in the paper (mean one), or in the logarithm (geometric mean one)."""

    bounds: tuple[float, float] | None = None
    """Every replica's value stays between them. The spread is narrowed on both sides alike where it would
    reach beyond. A schedule that leaves them within a round is cut there."""

    def __post_init__(self) -> None:
        require_choice("scale", self.scale, ("linear", "log"))
        self._require_spread("spread", self.spread)
        if self.bounds is not None:
            is_pair = isinstance(self.bounds, Sequence) and len(self.bounds) == 2
            require_kind("bounds must be a pair (low, high)", self.bounds, is_pair)
            low = require_number("bounds[0]", self.bounds[0], at_least=0)
            high = require_number("bounds[1]", self.bounds[1], at_least=0)
            if not low < high:
                raise ValueError(f"bounds must be a pair (low, high) with low < high, got {self.bounds!r}")
            object.__setattr__(self, "bounds", (low, high))

    def _require_spread(self, name: str, spread: float) -> None:
        below, remedy = (1, "use scale='log' for a wider range") if self.scale == "linear" else (math.inf, "")
        require_number(name, spread, at_least=0, below=below, remedy=remedy)

    def _tunable(self, name: str, slots: Sequence[Slot], **told: Any) -> Tunable:
        """A tunable for these slots, after a check of where they stand; ``told`` are its other settings."""
        settings = {"spread": self.spread, "scale": self.scale, "bounds": self.bounds}
        tunable = Tunable(name, slots, **settings | told)
        low, high = self.bounds or (-math.inf, math.inf)
        for slot in slots:
            # A scheduled value may come from outside the bounds: it is cut there.
            if slot.is_static and not low <= slot.scheduled <= high:
                raise ValueError(
                    f"{name} must start inside its bounds {self.bounds}, got {slot.scheduled!r}: "
                    "widen the bounds or change the value"
                )
        if tunable.spread > 0 and tunable.share == 0:
            where = "zero" if slots[0].scheduled == 0 else f"{slots[0].scheduled!r}, at the end of its range"
            warn(
                f"{name} is {where}: a spread around it that is a share of the base has no width, so nothing "
                "is explored. Start it at another value",
                NoEffectWarning,
            )
        return tunable


def read_number(name: str, value: Any) -> float:
    """``value`` as a float; integers and flags are refused, because factors near one mean nothing there."""
    why = "flags and whole numbers have nothing in between; write it as a float if it is one"
    require_kind(f"{name} must hold a float to be explored", value, isinstance(value, float), why)
    return value


# --- of the optimizer ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OptimizerField(Spreading):
    """Mechanism of the members below: one slot of the parameter groups, on its own or together."""

    per_group: bool = True
    """Each parameter group on its own, or one multiplier and one correction for all of them."""

    group_spreads: Sequence[float] | None = None
    """A spread for each parameter group, in place of one for all; see :func:`hdet.prior_from`."""

    floor: float | Sequence[float] | None = None
    """Where ``Controller(end="floor")`` takes the base by the end; one for all groups, or one each."""

    name: ClassVar[str] = ""
    keys: ClassVar[tuple[tuple[str, int | None], ...]] = ()
    """Where to look, in this order: a key of the group, and an index if it holds a tuple."""
    is_complement: ClassVar[bool] = False
    skips_zero: ClassVar[bool] = False
    """Groups that hold a zero are left alone."""
    remedy: ClassVar[str] = ""
    """What to do where all of them do."""
    title: ClassVar[str] = ""
    """Its name in warnings; empty for that of the class."""
    steered_by: ClassVar[str] = ""
    """Name of the only controller that moves it; empty for those that move all that is explored."""
    is_scheduled: ClassVar[bool] = False
    """A zero is only where the schedule begins."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_flag("per_group", self.per_group)
        if self.group_spreads is not None:
            must = "group_spreads must be a list of numbers"
            require_kind(must, self.group_spreads, is_list(self.group_spreads))
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
        num_groups = len(optimizer.param_groups)
        floors = _one_each("floor", self.floor, num_groups)
        spreads = _one_each("group_spreads", self.group_spreads or self.spread, num_groups)
        slots = {i: slot for i in range(num_groups) if (slot := self._slot(optimizer, i)) is not None}
        if not slots:
            looked_for = " or ".join(repr(key) for key, _ in self.keys) + " above zero" * self.skips_zero
            is_zero = any(key in group for key, _ in self.keys for group in optimizer.param_groups)
            warn(
                f"{self.title or type(self).__name__} found no {looked_for} in the groups of "
                f"{type(optimizer).__name__}, so it does nothing",
                NoEffectWarning,
                argument=self.name,
                remedy=self.remedy if is_zero else "",
            )
            return []
        told = {"is_scheduled": self.is_scheduled, "steered_by": self.steered_by}
        if not self.per_group:
            return [self._tunable(self.name, list(slots.values()), floor=floors[0], **told)]
        names = _group_names(self.name, optimizer)
        own = {i: {"spread": spreads[i], "floor": floors[i], **told} for i in slots}
        return [self._tunable(names[i], [slot], **own[i]) for i, slot in slots.items()]

    def _slot(self, optimizer: Optimizer, index: int) -> Slot | None:
        group = optimizer.param_groups[index]
        key, place = next((one for one in self.keys if one[0] in group), ("", None))
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
    """Let replicas differ in the weight decay; groups that have none (zero) are left alone.

    Held-out data moves it without that: :class:`hdet.HeldOutWeightDecay`, a controller.
    """

    spread: float = 0.5

    name = "weight_decay"
    keys = (("weight_decay", None),)
    skips_zero = True
    remedy = "set weight_decay=0.01 in the optimizer"


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


# --- any other ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Named:
    # Fields of a first base come first, so that the name can be given first.
    name: str
    get: Callable[[], float] = field(repr=False)
    set: Callable[[float], None] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Scalar(Spreading, _Named):
    """Explore anything: a name, a function that reads it, one that writes it.

    A focal loss whose gamma is a plain attribute, scored on a probe because gamma changes the loss::

        hdet.Scalar("focal_gamma", get=lambda: criterion.gamma,
                    set=lambda gamma: setattr(criterion, "gamma", gamma),
                    spread=0.5, bounds=(0, 5), changes_loss=True)
    """

    changes_loss: bool = False
    """Tells whether losses of replicas with different values cannot be compared: then a probe is needed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_name = isinstance(self.name, str) and self.name != ""
        require_kind("name must be a text that is not empty", self.name, is_name)
        require_kind("get must be callable", self.get, callable(self.get))
        require_kind("set must be callable", self.set, callable(self.set))
        require_flag("changes_loss", self.changes_loss)

    def tunables(self, optimizer: Optimizer) -> list[Tunable]:
        """One tunable."""
        read_number(self.name, self.get())
        return [self._tunable(self.name, [FunctionSlot(self.get, self.set)], changes_loss=self.changes_loss)]

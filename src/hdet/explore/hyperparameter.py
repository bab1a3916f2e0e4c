"""What a user asks to explore: a spread, its scale, and bounds; and the member that explores any scalar."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch.optim import Optimizer

from hdet.checks import require_choice, require_flag, require_number
from hdet.errors import NoEffectWarning, warn
from hdet.explore.slots import FunctionSlot, Slot
from hdet.explore.tunable import Tunable


class Hyperparameter(Protocol):
    """What a user asks to explore: it knows how to turn itself into tunables."""

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
            if not isinstance(self.bounds, Sequence) or len(self.bounds) != 2:
                raise TypeError(f"bounds must be a pair (low, high), got {self.bounds!r}")
            low, high = (
                require_number(f"bounds[{i}]", bound, at_least=0) for i, bound in enumerate(self.bounds)
            )
            if not low < high:
                raise ValueError(f"bounds must be a pair (low, high) with low < high, got {self.bounds!r}")
            object.__setattr__(self, "bounds", (low, high))

    def _require_spread(self, name: str, spread: float) -> None:
        if self.scale == "linear":
            remedy = "use scale='log' for a wider range"
            require_number(name, spread, at_least=0, below=1, remedy=remedy)
        else:
            require_number(name, spread, at_least=0)

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


def read_number(name: str, value: object) -> float:
    """``value`` as a float; integers and flags are refused, because factors near one mean nothing there."""
    if isinstance(value, (bool, int)) or not isinstance(value, float):
        raise TypeError(
            f"{name} must hold a float to be explored, got {value!r} of type {type(value).__name__}: flags "
            "and whole numbers have nothing in between; write it as a float if it is one"
        )
    return value


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
    """Whether losses of replicas with different values cannot be compared: then a probe is needed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name must be a text that is not empty, got {self.name!r}")
        for what in ("get", "set"):
            if not callable(getattr(self, what)):
                raise TypeError(f"{what} must be callable, got {getattr(self, what)!r}")
        require_flag("changes_loss", self.changes_loss)

    def tunables(self, optimizer: Optimizer) -> list[Tunable]:
        """One tunable."""
        read_number(self.name, self.get())
        return [self._tunable(self.name, [FunctionSlot(self.get, self.set)], changes_loss=self.changes_loss)]

"""The learning rate, per parameter group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch.optim import Optimizer

from hdet.core.checks import require_choice, require_flag, require_number
from hdet.core.spread import geometric_multipliers, multipliers
from hdet.hyperparameters.dial import Dial
from hdet.hyperparameters.fields import group_field

__all__ = ["LearningRate"]


@dataclass(frozen=True)
class LearningRate:
    """Explore the learning rate.

    >>> LearningRate(spread=1.2)
    Traceback (most recent call last):
    ValueError: spread must be a number in [0, 1), got 1.2: at 1 the lowest replica would not train
    """

    spread: float = 1 / 9
    """Half-width of the multipliers. Linear spacing: from 1 - spread to 1 + spread. Geometric: from
    1 / (1 + spread) to 1 + spread."""

    spacing: Literal["linear", "geometric"] = "linear"
    """Linear as in the paper (mean one), or even in the logarithm (geometric mean one)."""

    per_group: bool = True
    """Each parameter group on its own, or one multiplier and one correction for all of them."""

    floor: float | Sequence[float] | None = None
    """Where ``Controller(decay="floor")`` takes the base by the end; one for all groups, or one each."""

    def __post_init__(self) -> None:
        require_choice("spacing", self.spacing, ("linear", "geometric"))
        if self.spacing == "linear":
            remedy = "at 1 the lowest replica would not train"
            require_number("spread", self.spread, at_least=0, below=1, remedy=remedy)
        else:
            require_number("spread", self.spread, at_least=0)
        require_flag("per_group", self.per_group)
        if isinstance(self.floor, Sequence):
            object.__setattr__(self, "floor", tuple(self.floor))  # so that equal settings compare equal
        for floor in self._floors(1):
            if floor is not None:
                require_number("floor", floor, above=0)

    def dials(self, optimizer: Optimizer, num_replicas: int) -> list[Dial]:
        """One dial per parameter group, or a single one."""
        groups = optimizer.param_groups
        floors = self._floors(len(groups))
        if len(floors) != len(groups):
            raise ValueError(
                f"floor must have one entry per parameter group, got {len(floors)} for {len(groups)} groups"
            )
        if self.spacing == "linear":
            factors = multipliers(num_replicas, self.spread)
        else:
            factors = geometric_multipliers(num_replicas, 1 + self.spread)
        fields = [group_field(optimizer, i, "lr") for i in range(len(groups))]
        if not self.per_group:
            return [Dial("lr", fields, factors, floors[0])]
        names = _group_names(optimizer)
        return [Dial(names[i], [fields[i]], factors, floors[i]) for i in range(len(groups))]

    def _floors(self, num_groups: int) -> list[float | None]:
        return list(self.floor) if isinstance(self.floor, Sequence) else [self.floor] * num_groups


def _group_names(optimizer: Optimizer) -> list[str]:
    """``lr`` for a single group, else ``lr.NAME`` where the group has a name and ``lr.INDEX`` where not."""
    groups = optimizer.param_groups
    if len(groups) == 1:
        return ["lr"]
    names = [f"lr.{group.get('name', i)}" for i, group in enumerate(groups)]
    return names if len(set(names)) == len(names) else [f"lr.{i}" for i in range(len(groups))]

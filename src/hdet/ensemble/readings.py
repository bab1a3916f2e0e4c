"""Readings: what users read of an ensemble."""

from __future__ import annotations

from collections.abc import Sequence

from hdet.explore import ExploredValues
from hdet.replicas import Replicas
from hdet.steering import Controllers


class Readings:
    """What an ensemble tells of itself. It changes nothing."""

    explored: ExploredValues
    replicas: Replicas
    controllers: Controllers
    num_steps: int
    """Optimizer steps so far."""
    total_steps: int | None
    peaks: Sequence[Sequence[float]]
    """Of every slot of every learning rate, as asked for."""

    @property
    def base(self) -> dict[str, float]:
        """Give the shared value of every explored hyperparameter."""
        return self.explored.base

    @property
    def values(self) -> dict[str, float]:
        """Give the values that this replica uses."""
        return {t.name: t.value_with(t.multiplier) for t in self.explored.tunables}

    @property
    def multipliers(self) -> dict[str, float]:
        """Give this replica's factor on every base."""
        return {tunable.name: tunable.multiplier for tunable in self.explored.tunables}

    @property
    def positions(self) -> dict[str, float]:
        """Tell where this replica stands in every spread, from -1 to 1."""
        return {tunable.name: tunable.position for tunable in self.explored.tunables}

    @property
    def found_lr(self) -> dict[str, float]:
        """Give the peak of every learning rate as the run has corrected it; at first, what was asked for."""
        return {
            tunable.name: tunable.base if tunable.held is not None else peak[0] * tunable.correction
            for tunable, peak in zip(self.explored.learning_rates, self.peaks, strict=True)
        }

    def summary(self) -> str:
        """Tell in a few plain lines what was asked for, and where the run stands."""
        count = self.replicas.count
        lines = [f"{self._place}, {count} replica{'' if count == 1 else 's'}"]
        moves = [(name, p[0], lr) for (name, lr), p in zip(self.found_lr.items(), self.peaks, strict=True)]
        others = [t for t in self.explored.tunables if not t.is_scheduled and t.correction != 1]
        moves += [(t.name, t.slots[0].scheduled, t.base) for t in others]
        for name, asked, found in moves:
            moved = f"asked for {asked:.3g}, now {found:.3g} (x{found / asked:.3g})"
            lines.append(f"{name}: {moved if found != asked else f'{found:.3g}'}")
        return "\n".join([*lines, *self.controllers.notes])

    @property
    def _place(self) -> str:
        return f"step {self.num_steps}" + ("" if self.total_steps is None else f" of {self.total_steps}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self._place}>"

"""What a run has found, in a few plain lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from hdet.explore import Tunable
from hdet.telemetry import ScoutDecision

__all__ = ["Summary", "found_learning_rates", "peaks_of"]


def peaks_of(learning_rates: Sequence[Tunable], optimizer: Optimizer) -> list[list[float]]:
    """What was asked for: the peak of every learning rate and slot, as the schedule states it."""
    groups = optimizer.param_groups
    peaks = []
    for tunable in learning_rates:
        held = [groups[slot.group_index] for slot in tunable.slots]
        peaks.append([float(g.get("max_lr", g.get("initial_lr", g["lr"]))) for g in held])
    return peaks


def found_learning_rates(
    learning_rates: Sequence[Tunable], peaks: Sequence[Sequence[float]]
) -> dict[str, float]:
    """The peaks with what was learned of them: a correction, or a base that a controller holds."""
    return {
        tunable.name: tunable.held[0]
        if tunable.held is not None and tunable.control is not None
        else peak[0] * tunable.correction
        for tunable, peak in zip(learning_rates, peaks, strict=True)
    }


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Where a run stands; its text is for people."""

    num_steps: int
    total_steps: int | None
    num_replicas: int
    asked: Mapping[str, float]
    found: Mapping[str, float]
    is_scouting: bool
    num_scout_steps: int
    decision: ScoutDecision | None

    def __str__(self) -> str:
        """A few lines."""
        of = "" if self.total_steps is None else f" of {self.total_steps}"
        replicas = "1 replica" if self.num_replicas == 1 else f"{self.num_replicas} replicas"
        lines = [f"step {self.num_steps}{of}, {replicas}"]
        if self.is_scouting:
            lines.append("the scout is still trying learning rates: everything is put back when it ends")
        elif self.decision is not None:
            first = next(iter(self.asked.values()))
            d = self.decision
            low, high = (first * d.factor * bound / d.chosen for bound in (d.low, d.high))
            lines.append(
                f"the scout took {self.num_scout_steps} steps and chose {first * d.factor:.3g}, likely "
                f"between {low:.3g} and {high:.3g}" + (f" ({d.reason})" if d.reason else "")
            )
        for name, asked in self.asked.items():
            found = self.found[name]
            lines.append(f"{name}: asked for {asked:.3g}, now {found:.3g} (x{found / asked:.3g})")
        return "\n".join(lines)

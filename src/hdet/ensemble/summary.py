"""What a run has found, in a few plain lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from hdet.explore import Tunable
from hdet.replicas.claims import peak_rate


def peaks_of(learning_rates: Sequence[Tunable], optimizer: Optimizer) -> list[list[float]]:
    """What was asked for: the peak of every learning rate and slot, as the schedule states it."""
    groups = optimizer.param_groups
    peaks = []
    for tunable in learning_rates:
        held = [groups[slot.group_index] for slot in tunable.slots]
        peaks.append([peak_rate(group) for group in held])
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

    def __str__(self) -> str:
        """A few lines."""
        of = "" if self.total_steps is None else f" of {self.total_steps}"
        replicas = "1 replica" if self.num_replicas == 1 else f"{self.num_replicas} replicas"
        lines = [f"step {self.num_steps}{of}, {replicas}"]
        for name, asked in self.asked.items():
            found = self.found[name]
            moved = found != asked
            lines.append(
                f"{name}: asked for {asked:.3g}, now {found:.3g} (x{found / asked:.3g})"
                if moved
                else f"{name}: {found:.3g}"
            )
        return "\n".join(lines)

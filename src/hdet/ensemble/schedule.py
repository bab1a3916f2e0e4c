"""The schedule that an ensemble follows."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["FollowedSchedule", "Schedule"]


class Schedule(Protocol):
    """What the ensemble asks of a schedule; every torch LRScheduler has it."""

    def step(self) -> Any:
        """Write the values of the next step into the optimizer."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a checkpoint."""
        ...


class FollowedSchedule:
    """The user's schedule, which is not stepped beyond the end of the run.

    Args:
        schedule: the user's; None for constant values.
        total_steps: length of the run, if it is known.
    """

    def __init__(self, schedule: Schedule | None, total_steps: int | None) -> None:
        self._schedule, self._total_steps = schedule, total_steps
        self.is_closed_form: bool = getattr(schedule, "is_closed_form", False)
        """Whether it never reads the current values, and knows what to do after its end."""

    def step(self, num_steps: int) -> None:
        """After this many optimizer steps: write the values of the next one."""
        # After the last step there is nothing to plan for, and a OneCycleLR would go beyond its curve.
        is_over = self._total_steps is not None and num_steps >= self._total_steps
        if self._schedule is not None and (self.is_closed_form or not is_over):
            self._schedule.step()

    def state_dict(self) -> dict[str, Any] | None:
        """The schedule's own state; None if it has none."""
        return self._schedule.state_dict() if hasattr(self._schedule, "state_dict") else None  # pyright: ignore[reportOptionalMemberAccess]

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load the schedule's own state."""
        if self._schedule is not None and state is not None:
            self._schedule.load_state_dict(state)

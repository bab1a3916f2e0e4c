"""The schedule that an ensemble follows, and how fast it goes."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["PacedSchedule", "Schedule"]


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


class PacedSchedule:
    """The user's schedule, stepped so that it ends with the last step.

    A scout takes steps away from the run. The schedule is then stepped twice now and then.

    Args:
        schedule: the user's; None for constant values.
        total_steps: length of the run, with the scout, if it is known.
    """

    def __init__(self, schedule: Schedule | None, total_steps: int | None) -> None:
        self._schedule, self._total_steps = schedule, total_steps
        self.is_closed_form: bool = getattr(schedule, "is_closed_form", False)
        """Whether it never reads the current values, and knows what to do after its end."""
        self.begin_at(0, 0)

    def begin_at(self, num_steps: int, num_scout_steps: int) -> None:
        """Go on after this many steps, of which the scout had some. The schedule itself is left as it is."""
        self._num_steps, self._pace = num_steps - num_scout_steps, 1.0
        self._num_scout_steps = num_scout_steps
        if self._total_steps is not None and num_scout_steps:
            self._pace = self._total_steps / max(1, self._total_steps - num_scout_steps)

    def step(self) -> None:
        """After an optimizer step: write the values of the next one."""
        self._num_steps += 1
        schedule = self._schedule
        if schedule is None:
            return
        # After the last step there is nothing to plan for, and a OneCycleLR would go beyond its curve.
        is_over = self._total_steps is not None and (
            self._num_steps + self._num_scout_steps >= self._total_steps
        )
        if is_over and not self.is_closed_form:
            return
        if self._pace == 1.0:
            schedule.step()
            return
        done, wanted = round((self._num_steps - 1) * self._pace), round(self._num_steps * self._pace)
        for _ in range(wanted - done):
            schedule.step()

    def state_dict(self) -> dict[str, Any] | None:
        """The schedule's own state; None if it has none."""
        return self._schedule.state_dict() if hasattr(self._schedule, "state_dict") else None  # pyright: ignore[reportOptionalMemberAccess]

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load the schedule's own state."""
        if self._schedule is not None and state is not None:
            self._schedule.load_state_dict(state)

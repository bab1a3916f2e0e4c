"""The schedule that an ensemble follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.optim.lr_scheduler import LRScheduler


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

    def check_state(self, state: Any) -> None:
        """Raise if the schedule does not take this. It is as before in any case."""
        if self._schedule is None or state is None:
            return
        why = _difference(self._schedule, state) or _refusal(self._schedule, state)
        if why:
            raise ValueError(
                f"state_dict scheduler must be a state of {type(self._schedule).__name__}, but {why}: build "
                "the ensemble with the scheduler that it was saved with"
            )

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load the schedule's own state."""
        if self._schedule is not None and state is not None:
            self._schedule.load_state_dict(state)


def _difference(schedule: Schedule, state: Any) -> str:
    """How a state differs from those of a scheduler of torch, which takes any; empty if it does not."""
    if not isinstance(state, Mapping):
        return f"it is {state!r}"
    if not isinstance(schedule, LRScheduler):
        return ""
    own = schedule.state_dict()
    # Releases of torch differ in private names, and earlier ones had "verbose".
    names, saved = ({n for n in keys if n[:1] != "_"} - {"verbose"} for keys in (own, state))
    if names != saved:
        return f"it has {', '.join(sorted(saved - names)) or 'nothing else'} and lacks " + (
            ", ".join(sorted(names - saved)) or "nothing"
        )
    here, there = len(own.get("base_lrs", ())), len(state.get("base_lrs", ()))
    return "" if here == there else f"it has {there} base_lrs and not {here}"


def _refusal(schedule: Schedule, state: Mapping[str, Any]) -> str:
    """Why a schedule cannot load a state, by a trial that is taken back; empty if it can."""
    own, names = dict(schedule.state_dict()), set(vars(schedule))
    try:
        schedule.load_state_dict(dict(state))
    except Exception as error:
        return f"it cannot be loaded ({type(error).__name__}: {error})"
    finally:
        schedule.load_state_dict(own)
        for name in set(vars(schedule)) - names:
            delattr(schedule, name)
    return ""

"""Steering: what moves the shared values during a run."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from hdet.telemetry import RoundRecord

__all__ = ["FollowSchedule", "Steering"]


class Steering(Protocol):
    """The hooks of a controller at work. An ensemble has one, and calls it at these points."""

    needs_loss: bool
    """Whether every step must come with a loss."""
    reads_gradients: bool
    """Whether it looks at the gradients, which must then be dense, and corrects what the scout has found."""

    @property
    def watches_probe(self) -> bool:
        """Whether it wants the probe to be scored at syncs, also where replicas do not differ."""
        ...

    def begin(self, num_scout_steps: int, room_above: float) -> None:
        """The run begins, or begins again, with the weights that replicas have now.

        Args:
            num_scout_steps: steps that the scout has taken away from it.
            room_above: how far the learning rate may be raised, by what trials did not survive.
        """
        ...

    def gradients_ready(self) -> None:
        """Before every optimizer step."""
        ...

    def step_made(self, run_step: int) -> None:
        """After an optimizer step.

        Args:
            run_step: how many the run has made, without those of the scout.
        """
        ...

    def sync(self, record: RoundRecord) -> None:
        """At a sync, after replicas were measured and averaged: decide, and tell the record."""
        ...

    def averaged(self) -> list[Tensor]:
        """Tensors that replicas average along with their parameters."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the CPU and numbers, the same on every replica after converging."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint. It is called after :meth:`begin`."""
        ...


class FollowSchedule:
    """Without a controller: the schedule alone decides."""

    needs_loss = False
    reads_gradients = False
    watches_probe = False

    def begin(self, num_scout_steps: int, room_above: float) -> None:
        """Nothing to prepare."""

    def gradients_ready(self) -> None:
        """Nothing to look at."""

    def step_made(self, run_step: int) -> None:
        """Nothing to do."""

    def sync(self, record: RoundRecord) -> None:
        """Nothing to decide."""

    def averaged(self) -> list[Tensor]:
        """Nothing of its own."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""

"""Steering: what moves the shared values during a run."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hdet.telemetry import RoundRecord

__all__ = ["Steering"]


class Steering:
    """A controller at work. An ensemble has one, and calls these hooks.

    This one does nothing: the schedule alone decides. Controllers derive from it.
    """

    needs_loss = False
    """Whether every step must come with a loss."""
    reads_gradients = False
    """Whether it looks at the gradients, which must then be dense, and corrects what the scout has found."""

    @property
    def watches_probe(self) -> bool:
        """Whether it wants the probe to be scored at syncs, also where replicas do not differ."""
        return False

    def begin(self, num_scout_steps: int, room_above: float) -> None:
        """The run begins, or begins again, with the weights that replicas have now.

        Args:
            num_scout_steps: steps that the scout has taken away from it.
            room_above: how far the learning rate may be raised, by what trials did not survive.
        """

    def gradients_ready(self) -> None:
        """Before every optimizer step."""

    def step_made(self, run_step: int) -> None:
        """After an optimizer step.

        Args:
            run_step: how many the run has made, without those of the scout.
        """

    def sync(self, record: RoundRecord) -> None:
        """At a sync, after replicas were measured and averaged: decide, and tell the record."""

    def averaged(self) -> list[Tensor]:
        """Tensors that replicas average along with their parameters."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the CPU and numbers, the same on every replica after converging."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint. It is called after :meth:`begin`."""

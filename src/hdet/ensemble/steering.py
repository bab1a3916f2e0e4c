"""Steering: what moves the shared values during a run."""

from __future__ import annotations

from typing import Any

from hdet.telemetry import RoundRecord

__all__ = ["Steering"]


class Steering:
    """A controller at work. An ensemble has one, and calls these hooks.

    This one does nothing: the schedule alone decides. Controllers derive from it.
    """

    def begin(self, num_steps: int) -> None:
        """The run begins, or begins again, with the weights that replicas have now.

        Args:
            num_steps: optimizer steps so far.
        """

    def sync(self, record: RoundRecord) -> None:
        """At a sync, after replicas were measured and averaged: decide, and tell the record."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the CPU and numbers, the same on every replica after converging."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint. It is called after :meth:`begin`."""

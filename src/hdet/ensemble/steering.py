"""Steering: what moves the shared values during a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdet.ensemble.state import check_keys
from hdet.records import RoundRecord


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

    has_gone_back = False
    """Whether the last sync has put earlier weights back."""

    controller = "none"
    """What is at work, in a word."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the CPU and numbers, the same on every replica after converging."""
        return {"controller": self.controller}

    def check_state(self, state: object) -> None:
        """Raise if :meth:`load_state_dict` could not load this. Any controller takes over from none."""
        check_keys("state_dict steering", state, ("controller",))
        assert isinstance(state, Mapping)
        if state["controller"] not in (self.controller, "none"):
            raise ValueError(
                f"state_dict must be of a run with the controller {self.controller!r}, got "
                f"{state['controller']!r}: build the ensemble with the controller that it was saved with"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint. It is called after :meth:`begin`."""

"""Checks of a checkpoint, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

__all__ = ["VERSION", "check_state"]

VERSION = 2
"""Of the state that an ensemble saves."""


def check_state(state: dict[str, Any], names: Collection[str], *, can_scout: bool) -> None:
    """Raise if a state is not one that an ensemble can load.

    Args:
        state: what was saved.
        names: of the hyperparameters that the ensemble explores.
        can_scout: whether it has a scout that could go on.
    """
    version = state.get("version")
    if version != VERSION:
        raise ValueError(
            f"state_dict must be of version {VERSION}, got version {version!r}: load it with the release of "
            "hdet that wrote it"
        )
    saved = set(state["tunables"])
    if saved != set(names):
        raise ValueError(
            f"state_dict must hold the hyperparameters {sorted(names)}, got {sorted(saved)}: "
            "build the ensemble with the parameter groups and explore= that it was saved with"
        )
    if state["scout"] is not None and not can_scout:
        raise ValueError(
            "state_dict must not be of a scout that is still at work where the ensemble has none, got one at "
            f"step {state['num_steps']}: build the ensemble with a scout, or start the run again"
        )

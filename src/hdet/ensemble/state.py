"""Checks of a checkpoint, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

__all__ = ["VERSION", "check_state"]

VERSION = 3
"""Of the state that an ensemble saves."""


def check_state(state: dict[str, Any], names: Collection[str]) -> None:
    """Raise if a state is not one that an ensemble can load.

    Args:
        state: what was saved.
        names: of the hyperparameters that the ensemble explores.
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

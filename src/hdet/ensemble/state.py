"""Checks of a checkpoint, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["VERSION", "check_state", "require_keys"]

VERSION = 3
"""Of the state that an ensemble saves."""


def require_keys(state: object, names: Collection[str], of: str) -> None:
    """Raise if a state is not what ``state_dict()`` returned.

    >>> require_keys({}, ["version"], "hdet.Ensemble")
    Traceback (most recent call last):
    ValueError: state_dict must be what state_dict() of an hdet.Ensemble returned, got no 'version' in []
    """
    rule = f"state_dict must be what state_dict() of an {of} returned"
    if not isinstance(state, Mapping):
        raise TypeError(f"{rule}, got {state!r} of type {type(state).__name__}")
    missing = [name for name in names if name not in state]
    if missing:
        raise ValueError(f"{rule}, got no {missing[0]!r} in {sorted(map(str, state))}")


def check_state(state: dict[str, Any], names: Collection[str]) -> None:
    """Raise if a state is not one that an ensemble can load.

    Args:
        state: what was saved.
        names: of the hyperparameters that the ensemble explores.
    """
    require_keys(state, ["version"], "hdet.Ensemble")
    version = state["version"]
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

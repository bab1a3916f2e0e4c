"""Checks of a state that was saved, before anything of it is loaded. They change nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from hdet.checks import require_count, require_flag, require_number
from hdet.explore import ExploredValues, Tunable
from hdet.replicas import Replicas
from hdet.replicas.shards import local_part
from hdet.replicas.stacked import StackedReplicas

_log = logging.getLogger(__name__)

VERSION = 4
"""Of the state that an ensemble saves."""

_STATE = (
    "version",
    "num_steps",
    "peaks",
    "optimizer_steps_are_seen",
    "losses",
    "tunables",
    "scheduler",
    "steering",
    "tail",
)
"""What it holds."""
_REMEDY = "build the ensemble with the parameter groups and settings that it was saved with"


def check_state(state: dict[str, Any], values: ExploredValues) -> None:
    """Raise if this is not the state of an ensemble that explores these values. Its parts check theirs."""
    check_version(state)
    check_keys("state_dict", state, _STATE)
    has_length = state.get("total_steps") is not None
    check_counts("state_dict", state, ("num_steps", "total_steps") if has_length else ("num_steps",))
    check_tunables(state["tunables"], values.tunables)
    check_peaks(state["peaks"], values.learning_rates)
    check_losses(state)


def log_other_settings(state: dict[str, Any], total_steps: int | None, num_replicas: int) -> None:
    """Tell what a run does that goes on with another length, or with more or fewer replicas."""
    num_steps, planned, num_saved = state["num_steps"], state.get("total_steps"), len(state["losses"])
    if None not in (planned, total_steps) and planned != total_steps:
        _log.warning(
            "step %d: the checkpoint is of a run of %d steps, and this one has %d. A schedule that "
            "depends on the length jumps, or ends at the old length",
            num_steps,
            planned,
            total_steps,
        )
    if num_saved != num_replicas:
        _log.warning(
            "step %d: a checkpoint of %d replicas is loaded into %d, so multipliers are spread anew and "
            "losses of the round that was saved are dropped",
            num_steps,
            num_saved,
            num_replicas,
        )


def check_version(state: object) -> None:
    """Raise if this is not a state of this version."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state_dict must be what state_dict() returned, got {state!r} of type {type(state).__name__}"
        )
    if "version" in state and state["version"] != VERSION:
        raise ValueError(
            f"state_dict must be of version {VERSION}, got version {state['version']!r}: load it with the "
            "release of hdet that wrote it"
        )


def check_keys(name: str, state: object, keys: Collection[str]) -> None:
    """Raise if a part of a state lacks something.

    >>> check_keys("state_dict", {"b": 1}, ["a", "b"])
    Traceback (most recent call last):
    ValueError: state_dict must hold a, b, but it has no a: load what state_dict() of an ensemble has returned
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"{name} must be a dictionary, got {state!r} of type {type(state).__name__}")
    if missing := [key for key in keys if key not in state]:
        raise ValueError(
            f"{name} must hold {', '.join(keys)}, but it has no {', '.join(missing)}: load what state_dict() "
            "of an ensemble has returned"
        )


def check_counts(name: str, state: Mapping[str, Any], keys: Collection[str]) -> None:
    """Raise unless these are whole numbers of at least zero."""
    for key in keys:
        require_count(f"{name} {key}", state[key], at_least=0)


def check_numbers(name: str, values: object, count: int, *, is_finite: bool = True) -> None:
    """Raise unless this is a list of so many numbers."""
    _check_list(name, values, count, "numbers")
    assert isinstance(values, Sequence)
    for value in values:
        if is_finite or not isinstance(value, float) or math.isfinite(value):
            require_number(name, value)


def check_tunables(state: object, tunables: Sequence[Tunable]) -> None:
    """Raise unless these are the states of these hyperparameters."""
    check_keys("state_dict tunables", state, ())
    assert isinstance(state, Mapping)
    names = [tunable.name for tunable in tunables]
    if set(state) != set(names):
        raise ValueError(
            f"state_dict must hold the hyperparameters {sorted(names)}, got {sorted(map(str, state))}: "
            "build the ensemble with the parameter groups and explore= that it was saved with"
        )
    for tunable in tunables:
        name, saved = f"state_dict {tunable.name}", state[tunable.name]
        check_keys(name, saved, ("scheduled", "held", "correction", "control", "decay", "share"))
        check_numbers(f"{name} scheduled", saved["scheduled"], len(tunable.slots))
        if saved["held"] is not None:
            check_numbers(f"{name} held", saved["held"], len(tunable.slots))
        if saved["control"] is not None:
            check_numbers(f"{name} control", saved["control"], 2)
        require_number(f"{name} correction", saved["correction"], above=0)
        require_number(f"{name} decay", saved["decay"])
        require_number(f"{name} share", saved["share"], at_least=0, at_most=1)


def check_peaks(peaks: object, learning_rates: Sequence[Tunable]) -> None:
    """Raise unless there is a peak for every slot of every learning rate."""
    _check_list("state_dict peaks", peaks, len(learning_rates), "lists")
    assert isinstance(peaks, Sequence)
    for peak, tunable in zip(peaks, learning_rates, strict=True):
        check_numbers("state_dict peaks", peak, len(tunable.slots))


def check_losses(state: Mapping[str, Any]) -> None:
    """Raise unless the losses of a round, and whether steps are seen, are what they are saved as."""
    require_flag("state_dict optimizer_steps_are_seen", state["optimizer_steps_are_seen"])
    if not isinstance(state["losses"], (list, tuple)):
        raise TypeError(f"state_dict losses must be a list, got {state['losses']!r}")
    for row in state["losses"]:
        check_numbers("state_dict losses", row, 3)


def check_weights(name: str, saved: object, replicas: Replicas) -> None:
    """Raise unless these have the shapes of the weights. There may have been another number of rows."""
    has_rows = isinstance(replicas, StackedReplicas)

    def fits(saved: Tensor, here: Tensor) -> bool:
        saved = local_part(saved)
        return saved.shape == here.shape or (
            has_rows and saved.ndim == 2 and len(saved) > 0 and saved.shape[1] == here.shape[1]
        )

    check_tensors(name, saved, replicas.weights(), fits)


def check_tensors(
    name: str, saved: object, here: Sequence[Tensor], fits: Callable[[Tensor, Tensor], bool]
) -> None:
    """Raise unless these are tensors that fit those that are here."""
    _check_list(name, saved, len(here), "tensors")
    assert isinstance(saved, Sequence)
    for i, (one, other) in enumerate(zip(saved, here, strict=True)):
        if not isinstance(one, Tensor):
            raise TypeError(f"{name} must hold tensors, got {type(one).__name__} at {i}")
        if not fits(one, other):
            raise ValueError(
                f"{name} must have shape {tuple(other.shape)} at {i}, got {tuple(one.shape)}: {_REMEDY}"
            )


def _check_list(name: str, values: object, count: int, what: str) -> None:
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{name} must be a list of {what}, got {values!r} of type {type(values).__name__}")
    if len(values) != count:
        raise ValueError(f"{name} must hold {count} {what}, got {len(values)}: {_REMEDY}")

"""Checks of tensors in a saved state, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hdet.checks import SAME_SETTINGS, check_list
from hdet.replicas.port import Replicas
from hdet.replicas.tensors import local_part


def check_weights(name: str, saved: object, replicas: Replicas, *, has_buffers: bool = False) -> None:
    """Raise unless these have the shapes of the weights. There may have been another number of rows."""
    here = replicas.weights_and_buffers() if has_buffers else replicas.weights()
    check_tensors(name, saved, here, has_rows=replicas.has_rows)


def check_tensors(name: str, saved: Any, here: Sequence[Tensor], *, has_rows: bool = False) -> None:
    """Raise unless these are tensors of the same shapes; where they have rows, of any number of them."""
    check_list(name, saved, len(here), "tensors")
    for i, (one, other) in enumerate(zip(saved, here, strict=True)):
        if not isinstance(one, Tensor):
            raise TypeError(f"{name} must hold tensors, got {type(one).__name__} at {i}")
        part = local_part(one)
        is_alike = has_rows and part.ndim > 0 and len(part) > 0 and part.shape[1:] == other.shape[1:]
        if part.shape != other.shape and not is_alike:
            raise ValueError(
                f"{name} must have shape {tuple(other.shape)} at {i}, got {tuple(one.shape)}: {SAME_SETTINGS}"
            )

"""The state of an optax optimizer: hdet's own, and the values that ``inject_hyperparams`` has put there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import optax  # pyright: ignore[reportMissingImports]

from hdet.checks import require_kind

RATE = "learning_rate"
_REMEDY = (
    "build it as optax.inject_hyperparams(optax.adamw)(learning_rate=1e-4), or with a function "
    "make_tx(learning_rate) of your own in place of optax.adamw"
)


class AutoLRState(NamedTuple):
    """Holds what :func:`auto_lr` keeps. It is all that a checkpoint needs."""

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    """Steps so far."""
    peaks: jax.Array
    """The peak learning rates, one for each that the optimizer has."""
    tail_mean: Any
    """The mean of the weights of the tail so far, in float32 where the weights have fewer bits."""
    num_taken: jax.Array
    """Number of steps in the mean."""
    inner_state: Any
    """State of the optimizer, with the learning rate of the last step."""


class EnsembleState(NamedTuple):
    """Holds what :class:`Ensemble` keeps for a replica. It is all that a checkpoint needs.

    Arrays have an entry for each explored value, unless they say otherwise.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    """Steps so far."""
    planned: jax.Array
    """The values that the optimizer was built with."""
    held: jax.Array
    """The base that the controller holds; zero while the plan decides."""
    velocity: jax.Array
    """The controller's smoothed signal."""
    multipliers: jax.Array
    """One row for each value: the multiplier of every replica in this round."""
    losses: jax.Array
    """Of this replica in this round: sum, number of finite ones, number of others."""
    reports: jax.Array
    """One row for each replica, as it was at the last converge: its losses, and if its weights are finite."""
    inner_state: Any
    """State of the optimizer, with the values of the last step."""


_OWNERS = {AutoLRState: "hdet.jax.auto_lr", EnsembleState: "hdet.jax.Ensemble"}


def require_transformation(tx: object) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer, with support for extra arguments; raises if it is none."""
    is_right = isinstance(tx, optax.GradientTransformation)
    require_kind("tx must be an optax.GradientTransformation", tx, is_right, _REMEDY)
    return optax.with_extra_args_support(tx)


def require_values(state: Any, name: str = RATE) -> list[jax.Array]:
    """Read the values of this name that a fresh state of the optimizer holds; raises if they cannot be set.

    >>> tx = optax.inject_hyperparams(optax.adamw)(learning_rate=0.25)
    >>> [rate.item() for rate in require_values(tx.init(jnp.zeros(2)))]
    [0.25]
    """
    for part in parts_of(state, tuple(_OWNERS)):
        owner = _OWNERS[type(part)]
        raise ValueError(f"tx must be the optimizer alone, got {owner}: pass what it was made from")
    values = read_values(state, name)
    if not values:
        raise ValueError(f"tx must hold its {name} in its state, but it does not: {_REMEDY}")
    for node in _injected(state, name):
        if name in getattr(node, "hyperparams_states", {}):
            raise ValueError(
                f"tx must have a number as its {name}, got a schedule: pass a number, and leave the schedule "
                "to hdet.jax.auto_lr, or to hdet.jax.Ensemble(schedule=...)"
            )
    for value in values:
        if value.ndim:
            raise ValueError(f"tx must have one number as its {name}, got shape {value.shape}")
    return values


def read_values(state: Any, name: str = RATE) -> list[jax.Array]:
    """Read the values of this name in a state, in its order."""
    return [node.hyperparams[name] for node in _injected(state, name)]


def write_values(state: Any, values: Iterable[Any], name: str = RATE) -> Any:
    """Return the state with these values, in the order of :func:`read_values`.

    >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    >>> state = write_values(tx.init(jnp.zeros(2)), [0.5])
    >>> updates, state = tx.update(jnp.ones(2), state)
    >>> updates.tolist(), read_values(state)[0].item()
    ([-0.5, -0.5], 0.5)
    """
    left = iter(values)

    def write(node: Any) -> Any:
        new = jnp.asarray(next(left), dtype=node.hyperparams[name].dtype)
        node = node._replace(hyperparams={**node.hyperparams, name: new})
        return node._replace(inner_state=change(node.inner_state))

    def change(state: Any) -> Any:
        is_injected = _is_injected(name)
        return jax.tree.map(lambda x: write(x) if is_injected(x) else x, state, is_leaf=is_injected)

    return change(state)


def parts_of(state: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """List the parts of a state that are of this kind.

    >>> len(parts_of(optax.adam(0.1).init(jnp.zeros(2)), optax.ScaleByAdamState))
    1
    """
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def wide(array: jax.Array) -> Any:
    """Name the type in which an array is averaged: its own, and float32 at least."""
    return jnp.promote_types(array.dtype, jnp.float32)


def _is_injected(name: str) -> Callable[[Any], bool]:
    """Make a test for what ``inject_hyperparams`` keeps, with a value of this name in it."""
    kinds = (optax.InjectStatefulHyperparamsState, optax.InjectHyperparamsState)
    return lambda node: isinstance(node, kinds) and name in node.hyperparams


def _injected(state: Any, name: str) -> Iterator[Any]:
    is_injected = _is_injected(name)
    for node in jax.tree.leaves(state, is_leaf=is_injected):
        if is_injected(node):
            yield node
            yield from _injected(node.inner_state, name)

"""The state of an optax optimizer, where ``inject_hyperparams`` has put its learning rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import optax  # pyright: ignore[reportMissingImports]

_NAME = "learning_rate"
_REMEDY = (
    "build it as optax.inject_hyperparams(optax.adamw)(learning_rate=1e-4), or with a function "
    "make_tx(learning_rate) of your own in place of optax.adamw"
)


def require_transformation(tx: object) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer, with support for extra arguments; raises if it is none."""
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"tx must be an optax.GradientTransformation, got {tx!r} of type {type(tx).__name__}: {_REMEDY}"
        )
    return optax.with_extra_args_support(tx)


def require_rates(state: Any) -> list[jax.Array]:
    """Read the learning rates that a fresh state of the optimizer holds; raises if they cannot be set.

    >>> tx = optax.inject_hyperparams(optax.adamw)(learning_rate=0.25)
    >>> [rate.item() for rate in require_rates(tx.init(jnp.zeros(2)))]
    [0.25]
    """
    rates = read_rates(state)
    if not rates:
        raise ValueError(f"tx must hold its learning rate in its state, but it does not: {_REMEDY}")
    for node in _injected(state):
        if _NAME in getattr(node, "hyperparams_states", {}):
            raise ValueError(
                "tx must have a number as its learning_rate, got a schedule: pass the number that the "
                "search shall start from, and leave the schedule to hdet.jax.auto_lr"
            )
    for rate in rates:
        if rate.ndim:
            raise ValueError(f"tx must have one number as its learning_rate, got shape {rate.shape}")
    return rates


def read_rates(state: Any) -> list[jax.Array]:
    """Read the learning rates in a state, in its order."""
    return [node.hyperparams[_NAME] for node in _injected(state)]


def write_rates(state: Any, rates: Sequence[Any] | jax.Array) -> Any:
    """Return the state with these learning rates, in the order of :func:`read_rates`.

    >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    >>> state = write_rates(tx.init(jnp.zeros(2)), [0.5])
    >>> updates, state = tx.update(jnp.ones(2), state)
    >>> updates.tolist(), read_rates(state)[0].item()
    ([-0.5, -0.5], 0.5)
    """
    left = iter(rates)

    def write(node: Any) -> Any:
        old = node.hyperparams[_NAME]
        new = jnp.asarray(next(left), dtype=old.dtype)
        node = node._replace(hyperparams={**node.hyperparams, _NAME: new})
        return node._replace(inner_state=_map(write, node.inner_state))

    return _map(write, state)


def parts_of(state: Any, kind: type) -> list[Any]:
    """List the parts of a state that are of this kind.

    >>> len(parts_of(optax.adam(0.1).init(jnp.zeros(2)), optax.ScaleByAdamState))
    1
    """
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def _is_injected(node: Any) -> bool:
    """Tell if it is what ``inject_hyperparams`` keeps, with a learning rate in it."""
    kinds = (optax.InjectStatefulHyperparamsState, optax.InjectHyperparamsState)
    return isinstance(node, kinds) and _NAME in node.hyperparams


def _map(change: Callable[[Any], Any], state: Any) -> Any:
    return jax.tree.map(lambda x: change(x) if _is_injected(x) else x, state, is_leaf=_is_injected)


def _injected(state: Any) -> Iterator[Any]:
    for node in jax.tree.leaves(state, is_leaf=_is_injected):
        if _is_injected(node):
            yield node
            yield from _injected(node.inner_state)

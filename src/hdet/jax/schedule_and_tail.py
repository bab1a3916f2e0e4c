"""auto_lr for JAX: the recommended schedule and the mean of the last weights, as an optax transformation."""

from __future__ import annotations

from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import optax  # pyright: ignore[reportMissingImports]

from hdet.checks import require_kind
from hdet.jax.optax_state import (
    AutoLRState,
    parts_of,
    require_transformation,
    require_values,
    wide,
    write_values,
)
from hdet.method.recipe import Recipe, tail_steps
from hdet.search.found import FoundLR


def auto_lr(
    tx: optax.GradientTransformation, *, total_steps: int, found: FoundLR | None = None
) -> optax.GradientTransformationExtraArgs:
    """Train with the learning rate that :func:`hdet.jax.find_lr` has found.

    The optimizer, with a linear warm-up over 40 % of the steps and a linear anneal to 15 % of the peak. Its
    state keeps the mean of the weights of the last steps, which :func:`eval_params` gives. After
    ``total_steps`` the learning rate stays as it is.

    Unlike :class:`hdet.AutoLR` it has no guard. Updates are added to the weights, and no update brings back
    weights that are not finite.

    Args:
        tx: an optimizer whose learning rate is in its state, as :func:`optax.inject_hyperparams` puts it.
        total_steps: length of training in optimizer steps.
        found: what the search has found; None for the learning rate that ``tx`` has, and where the state
            comes from a checkpoint.

    Returns:
        A transformation that takes the place of ``tx``. ``update`` needs ``params``, and hands what else it
        is given, such as ``value=loss``, to ``tx``.

    >>> tx = auto_lr(optax.inject_hyperparams(optax.sgd)(learning_rate=1.0), total_steps=100)
    >>> params = jnp.zeros(2)
    >>> state = tx.init(params)
    >>> updates, state = tx.update(jnp.ones(2), state, params)
    >>> updates.round(2).tolist()  # the warm-up begins at 1/25
    [-0.03999999910593033, -0.03999999910593033]
    """
    inner = require_transformation(tx)
    recipe = Recipe(total_steps=total_steps)
    if found is not None:
        rule = "found must be what hdet.jax.find_lr returned, or None"
        require_kind(rule, found, isinstance(found, FoundLR))
        found.warn_of_other_length(total_steps)
    tail = tail_steps(total_steps, recipe.average_tail)
    knots = [0, round(recipe.warmup * total_steps), total_steps]  # the shape is linear between these
    factors = [recipe.shape(step) for step in knots]

    def init(params: Any) -> AutoLRState:
        inner_state = inner.init(params)
        peaks = _peaks_of(inner_state, found)
        return AutoLRState(
            count=jnp.zeros((), jnp.int32),
            peaks=peaks,
            tail_mean=jax.tree.map(lambda p: jnp.zeros_like(p, dtype=wide(p)), params),
            num_taken=jnp.zeros((), jnp.int32),
            inner_state=write_values(inner_state, factors[0] * peaks),
        )

    def update(
        updates: Any, state: AutoLRState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, AutoLRState]:
        if params is None:
            raise ValueError("params must be given to update, got None: call tx.update(grads, state, params)")
        factor = jnp.interp(state.count, jnp.array(knots), jnp.array(factors))
        inner_state = write_values(state.inner_state, factor * state.peaks)
        updates, inner_state = inner.update(updates, inner_state, params, **extra_args)
        count = state.count + 1

        def take() -> tuple[Any, jax.Array]:
            num_taken = state.num_taken + 1
            new_params = optax.apply_updates(params, updates)
            return jax.tree.map(
                lambda mean, p: mean + (p.astype(mean.dtype) - mean) / num_taken, state.tail_mean, new_params
            ), num_taken

        is_tail = (count >= tail[0]) & (count <= tail[-1]) & ((count - tail[0]) % tail.step == 0)
        mean, num_taken = jax.lax.cond(is_tail, take, lambda: (state.tail_mean, state.num_taken))
        return updates, AutoLRState(count, state.peaks, mean, num_taken, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def eval_params(state: Any, params: Any) -> Any:
    """Take what to evaluate and to keep: the mean of the weights of the last steps.

    Before the tail, which is the last 7.5 % of the steps, it is the weights themselves.

    Args:
        state: the optimizer's state, with that of :func:`auto_lr` in it.
        params: the weights now.

    >>> tx = auto_lr(optax.inject_hyperparams(optax.sgd)(learning_rate=1.0), total_steps=100)
    >>> eval_params(tx.init(jnp.ones(2)), jnp.ones(2)).tolist()
    [1.0, 1.0]
    """
    states = parts_of(state, AutoLRState)
    if len(states) != 1:
        raise ValueError(
            f"state must hold that of one hdet.jax.auto_lr, got {len(states)}: pass the state of the "
            "optimizer that trains"
        )
    (auto,) = states
    return jax.tree.map(
        lambda mean, p: jnp.where(auto.num_taken > 0, mean.astype(p.dtype), p), auto.tail_mean, params
    )


def _peaks_of(inner_state: Any, found: FoundLR | None) -> jax.Array:
    rates = require_values(inner_state)
    if found is None:
        return jnp.stack([rate.astype(wide(rate)) for rate in rates])
    if len(found.lr) != len(rates):
        raise ValueError(
            f"tx must have the {len(found.lr)} learning rates that the search had, got {len(rates)}: search "
            "with the optimizer that trains"
        )
    return jnp.array(found.lr)

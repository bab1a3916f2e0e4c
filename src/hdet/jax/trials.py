"""Trials: several learning rates train from the same parameters, at the same time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
import optax  # pyright: ignore[reportMissingImports]

from hdet.jax.places import Places, split
from hdet.jax.rates import write_rates
from hdet.search.decisions import trial_shape

Loss = Callable[[Any, Any], jax.Array]


def one_step(
    loss_fn: Loss,
    tx: optax.GradientTransformationExtraArgs,
    params: Any,
    state: Any,
    rates: Any,
    batch: Any,
) -> tuple[Any, Any, jax.Array]:
    """Parameters and state after a step with these learning rates, and the loss before it.

    Where the loss is not finite there is no step.
    """
    loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
    updates, new_state = tx.update(gradients, write_rates(state, rates), params, value=loss)
    new_params = optax.apply_updates(params, updates)
    return *_where(jnp.isfinite(loss), (new_params, new_state), (params, state)), loss


def _where(condition: jax.Array, these: Any, those: Any) -> Any:
    return jax.tree.map(partial(jnp.where, condition), these, those)


class Trials:
    """What makes trials.

    Args:
        loss_fn: what they train on.
        score_fn: what they are scored by.
        tx: the optimizer.
        places: where they are made.
        num_trials: how many there are, each with a part of every batch.
        num_at_once: how many of them share the memory.
    """

    def __init__(
        self,
        loss_fn: Loss,
        score_fn: Loss,
        tx: optax.GradientTransformationExtraArgs,
        places: Places,
        *,
        num_trials: int,
        num_at_once: int,
    ) -> None:
        self._loss_fn, self._tx, self._places, self._num_trials = loss_fn, tx, places, num_trials
        self._num_rows = min(num_trials, max(1, num_at_once // places.count) * places.count)
        self._init = jax.jit(lambda rows: places.spread(jax.vmap(tx.init)(rows)))
        self._step = jax.jit(self._step_rows, donate_argnums=(0, 1))
        self._score = jax.jit(
            lambda rows, batch: places.gather(jax.vmap(score_fn, (0, None))(rows, places.gather(batch)))
        )

    def make(
        self, params: Any, rates: Sequence[Sequence[float]], batches: Sequence[Any], probe: Sequence[Any]
    ) -> tuple[list[float], int]:
        """Scores, and how many parts of batches were bad.

        Args:
            params: where all of them start.
            rates: the peak learning rates of each trial.
            batches: one for each step.
            probe: what is scored on.
        """
        scores, num_bad = list[float](), 0
        for first in range(0, self._num_trials, self._num_rows):
            here = np.asarray(rates[first : first + self._num_rows])
            rows = self._places.repeat(params, len(here))
            state, health = self._init(rows), (jnp.ones(len(here), bool), jnp.zeros((), int))
            for step, batch in enumerate(batches):
                factor = trial_shape(step, len(batches))
                rows, state, health = self._step(rows, state, health, params, factor * here, batch, first)
            is_alive, num_bad_here = jax.device_get(health)
            losses = np.stack([np.asarray(self._score(rows, batch)) for batch in probe], axis=1)
            means = [fmean(row.tolist()) for row in losses]
            scores += [mean if alive else math.nan for mean, alive in zip(means, is_alive, strict=True)]
            num_bad += int(num_bad_here)
        return scores, num_bad

    def _step_rows(
        self, rows: Any, state: Any, health: Any, start: Any, rates: jax.Array, batch: Any, first: int
    ) -> tuple[Any, Any, Any]:
        """One step of the trials from ``first`` on."""
        is_alive, num_bad = health
        parts, axes = split(batch, self._num_trials)

        def row_of(leaf: Any, axis: int | None) -> Any:
            if axis is None:
                return leaf
            return self._places.spread(jax.lax.dynamic_slice_in_dim(leaf, first, len(rates)))

        leaves, structure = jax.tree.flatten(parts)
        parts = structure.unflatten(map(row_of, leaves, structure.flatten_up_to(axes)))
        step = partial(one_step, self._loss_fn, self._tx)
        new_rows, new_state, losses = jax.vmap(step, (0, 0, 0, axes))(rows, state, rates, parts)
        is_finite = jnp.isfinite(losses)
        # Where the loss is not finite with good parameters either, the data is at fault.
        is_bad = jax.lax.cond(
            jnp.all(is_finite),
            lambda: jnp.zeros_like(is_finite),
            lambda: ~jnp.isfinite(jax.vmap(self._loss_fn, (None, axes))(start, parts)),
        )
        num_bad += jnp.sum(is_alive & ~is_finite & is_bad)
        is_alive &= is_finite | is_bad
        return self._places.spread(new_rows), self._places.spread(new_state), (is_alive, num_bad)

"""JaxTrainee: trains and scores for a search. Trials run at the same time, from the same parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
import optax  # pyright: ignore[reportMissingImports]

from hdet.checks import require_kind
from hdet.jax.optax_state import write_values
from hdet.jax.trial_mesh import TrialMesh, size_of, split
from hdet.search.decisions import least_examples, num_parts, trial_shape

Loss = Callable[[Any, Any], jax.Array]


class JaxTrainee:
    """Trains parameters for a search. See :class:`hdet.search.driver.Trainee`.

    Args:
        loss_fn: what is trained on.
        score_fn: what is scored by; None for the same.
        params: where training starts.
        tx: the optimizer.
        asked: its learning rates.
        trials_at_once: how many trials share the memory; None for all that are made at the same time.
    """

    def __init__(
        self,
        loss_fn: Loss,
        score_fn: Loss | None,
        params: Any,
        tx: optax.GradientTransformationExtraArgs,
        asked: Sequence[float],
        trials_at_once: int | None,
    ) -> None:
        self.mesh = mesh = TrialMesh(params)
        """The devices that trials are made on."""
        self._loss_fn = checked("loss_fn", loss_fn)
        score_fn = self._loss_fn if score_fn is None else checked("score_fn", score_fn)
        self._tx = tx
        self.asked = asked
        self._at_once = trials_at_once
        self.steps_shrink = _is_adagrad(tx, params)
        self._num_bad = 0
        self._num_trials = 1
        self._params = self._kept = mesh.put(params)
        self._loss_of = jax.jit(score_fn)
        self._step = jax.jit(self._one_step)
        self._init_rows = jax.jit(lambda rows: mesh.spread(jax.vmap(tx.init)(rows)))
        self._step_rows = jax.jit(self._steps, donate_argnums=(0, 1))
        self._score_rows = jax.jit(
            lambda rows, batch: mesh.gather(jax.vmap(score_fn, (0, None))(rows, mesh.gather(batch)))
        )

    def num_trials_at_once(self, batch: Any) -> int:
        """Count one for every example that a device has, up to what a search needs."""
        count = self.mesh.count
        self._num_trials = count * num_parts(count, size_of(batch) // count)
        return self._num_trials

    def has_enough(self, batch: Any) -> bool:
        """Tell if there is an example for every trial."""
        return self._num_trials == 1 or size_of(batch) >= self._num_trials

    def without_bad(self, batches: list[Any]) -> list[Any]:
        """Leave out batches whose loss is not finite."""
        good = [batch for batch in batches if math.isfinite(self.score([batch]))]
        self._num_bad += len(batches) - len(good)
        return good

    def score(self, batches: Sequence[Any]) -> float:
        """Take the mean loss of these batches."""
        return fmean(float(self._loss_of(self._params, batch)) for batch in batches)

    def num_bad(self) -> int:
        """Count the batches that were left out so far."""
        return self._num_bad

    def begin_ramp(self) -> None:
        """Make a new state of the optimizer."""
        self._state = self._tx.init(self._params)

    def ramp_step(self, factor: float, batch: Any) -> None:
        """Make a step, or count the batch: the probe was finite with these parameters."""
        rates = [factor * lr for lr in self.asked]
        self._params, self._state, loss = self._step(self._params, self._state, rates, batch)
        self._num_bad += not math.isfinite(float(loss))

    def keep_weights(self) -> None:
        """Remember the parameters."""
        self._kept = self._params

    def try_out(
        self,
        factors: Sequence[float],
        turns: Iterable[list[Any]],
        probe: list[Any],
        steps_made: Callable[[int], None],
    ) -> Sequence[float]:
        """Make a trial with each factor, and score it on the probe."""
        num, count, scores = self._num_trials, self.mesh.count, list[float]()
        num_rows = min(num, max(1, (self._at_once or num) // count) * count)
        for turn, batches in enumerate(turns):
            here = factors[turn * num :][:num]
            for first in range(0, num, num_rows):
                scores += self._trials(here[first : first + num_rows], first, batches, probe, steps_made)
        return scores

    def _trials(
        self,
        factors: Sequence[float],
        first: int,
        batches: Sequence[Any],
        probe: Sequence[Any],
        steps_made: Callable[[int], None],
    ) -> list[float]:
        """Make some trials at the same time, on the parts of the batches from ``first`` on."""
        rates = np.outer(factors, self.asked)
        rows = self.mesh.repeat(self._kept, len(rates))
        state, health = self._init_rows(rows), (jnp.ones(len(rates), bool), jnp.zeros((), int))
        for step, batch in enumerate(batches):
            now = trial_shape(step, len(batches)) * rates
            rows, state, health = self._step_rows(rows, state, health, self._kept, now, batch, first)
            steps_made(len(rates))
        is_alive, num_bad = jax.device_get(health)
        self._num_bad += int(num_bad)
        losses = np.stack([np.asarray(self._score_rows(rows, batch)) for batch in probe], axis=1)
        means = [fmean(row.tolist()) for row in losses]
        return [mean if alive else math.nan for mean, alive in zip(means, is_alive, strict=True)]

    def _steps(
        self, rows: Any, state: Any, health: Any, start: Any, rates: jax.Array, batch: Any, first: int
    ) -> tuple[Any, Any, Any]:
        """Make one step of the trials from ``first`` on."""
        is_alive, num_bad = health
        parts, axes = split(batch, self._num_trials, least=least_examples(size_of(batch)))

        def row_of(leaf: Any, axis: int | None) -> Any:
            if axis is None:
                return leaf
            return self.mesh.spread(jax.lax.dynamic_slice_in_dim(leaf, first, len(rates)))

        leaves, structure = jax.tree.flatten(parts)
        parts = structure.unflatten(map(row_of, leaves, structure.flatten_up_to(axes)))
        new_rows, new_state, losses = jax.vmap(self._one_step, (0, 0, 0, axes))(rows, state, rates, parts)
        is_finite = jnp.isfinite(losses)
        # Where the loss is not finite with good parameters either, the data is at fault.
        is_bad = jax.lax.cond(
            jnp.all(is_finite),
            lambda: jnp.zeros_like(is_finite),
            lambda: ~jnp.isfinite(jax.vmap(self._loss_fn, (None, axes))(start, parts)),
        )
        num_bad += jnp.sum(is_alive & ~is_finite & is_bad)
        is_alive &= is_finite | is_bad
        return self.mesh.spread(new_rows), self.mesh.spread(new_state), (is_alive, num_bad)

    def _one_step(self, params: Any, state: Any, rates: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        """Make a step with these learning rates, unless the loss before it is not finite."""
        loss, gradients = jax.value_and_grad(self._loss_fn)(params, batch)
        updates, new_state = self._tx.update(gradients, write_values(state, rates), params, value=loss)
        after = optax.apply_updates(params, updates), new_state
        return *jax.tree.map(partial(jnp.where, jnp.isfinite(loss)), after, (params, state)), loss


def checked(name: str, function: Loss) -> Loss:
    """Let a loss raise while it is traced, unless it returns one real number."""

    def call(params: Any, batch: Any) -> jax.Array:
        result = jax.eval_shape(function, params, batch)
        is_one = isinstance(result, jax.ShapeDtypeStruct)
        require_kind(f"{name} must return the loss alone", result, is_one, "leave out what is beside it")
        if result.shape != () or not jnp.issubdtype(result.dtype, jnp.floating):
            raise ValueError(
                f"{name} must return one real number, got {result}: return the mean over the batch"
            )
        return function(params, batch)

    return call


def _is_adagrad(tx: optax.GradientTransformationExtraArgs, params: Any) -> bool:
    """Look for the state of Adagrad anywhere in that of the optimizer."""
    state = jax.eval_shape(tx.init, params)
    kind = optax.ScaleByRssState
    return any(
        isinstance(node, kind) for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    )

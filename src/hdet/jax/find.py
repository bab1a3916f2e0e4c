"""find_lr for JAX: the learning rate for a whole run, found by short trials before it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import optax  # pyright: ignore[reportMissingImports]

from hdet.checks import require_count, require_number
from hdet.errors import NotFiniteError
from hdet.jax.auto import is_auto_lr
from hdet.jax.places import Places, size_of
from hdet.jax.rates import require_rates, require_transformation
from hdet.jax.trials import Loss, Trials, one_step
from hdet.search.batches import endless
from hdet.search.decisions import (
    LEAST_STEPS,
    Ramp,
    Trial,
    lengths,
    next_ramp,
    num_parts,
    ramp_factor,
    trial_factors,
    try_out,
)
from hdet.search.found import FoundLR

_log = logging.getLogger(__name__)

_PROBE_STEPS = 4
"""Without a probe, the batches of so many steps serve as one. Trials do not train on them."""


def find_lr(
    loss_fn: Loss,
    params: Any,
    tx: optax.GradientTransformation,
    batches: Iterable[Any],
    *,
    total_steps: int,
    probe: Any = None,
    score_fn: Loss | None = None,
    trials_at_once: int | None = None,
) -> FoundLR:
    """Find the learning rate for a run of ``total_steps``, before it begins.

    It is :func:`hdet.find_lr`, step for step. A ramp of the learning rate finds the range, and a few short
    trials from there find the best in it. They are made at the same time by :func:`jax.vmap`, each on its own
    part of every batch. Where the parameters are replicated over the devices of a mesh, each device makes its
    share. Nothing of the caller's changes. Call it outside of ``jit``.

    Args:
        loss_fn: ``loss_fn(params, batch)``, a scalar. It must be such that ``jit`` and ``vmap`` take it.
        params: where training starts. They may be sharded.
        tx: an optimizer whose learning rate is in its state, as :func:`optax.inject_hyperparams` puts it
            there: ``optax.inject_hyperparams(optax.adamw)(learning_rate=1e-4)``. The learning rate is where
            the search starts. If there are several, all are scaled together.
        batches: training batches, whole ones if they are sharded. The first dimension of their arrays holds
            examples. Arrays of another size, such as a random key, go to all trials as they are.
        total_steps: length of the run in optimizer steps.
        probe: one held-out batch that trials are scored on. Without it the first few training batches are,
            which no trial then trains on.
        score_fn: what trials are scored by, such as the loss without dropout; None for ``loss_fn``.
        trials_at_once: how many trials are in memory; None for all of them, which are eight as a rule. Fewer
            take longer and find the same.

    >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=1e-4)
    >>> data = list(jax.random.normal(jax.random.key(0), (20, 16, 8)))
    >>> loss_fn = lambda w, x: jnp.mean((x @ w - x.sum(axis=1)) ** 2)
    >>> found = find_lr(loss_fn, jnp.zeros(8), tx, data, total_steps=500)
    >>> found.lr[0] > 1e-3, found.asked[0] < 1e-3
    (True, True)
    """
    require_count(
        "total_steps", total_steps, at_least=LEAST_STEPS, remedy="a shorter run cannot afford a search"
    )
    if trials_at_once is not None:
        require_count("trials_at_once", trials_at_once)
    for name, function in (("loss_fn", loss_fn), ("score_fn", score_fn)):
        if not callable(function) and not (name == "score_fn" and function is None):
            raise TypeError(
                f"{name} must be a function {name}(params, batch), got {function!r} of type "
                f"{type(function).__name__}"
            )
    tracer = jax.core.Tracer  # pyright: ignore[reportAttributeAccessIssue]
    if any(isinstance(leaf, tracer) for leaf in jax.tree.leaves(params)):
        raise TypeError("params must be arrays, got tracers: call find_lr outside of jit, grad and vmap")
    tx = require_transformation(tx)
    state = tx.init(params)
    if is_auto_lr(state):
        raise ValueError("tx must be the optimizer alone, got hdet.jax.auto_lr: pass what it was made from")
    if any(isinstance(x, optax.MultiStepsState) for x in jax.tree.leaves(state, is_leaf=_is_multi_steps)):
        raise ValueError(
            "tx must make a step of every batch, got optax.MultiSteps: pass what it was made from, and whole "
            "batches"
        )
    asked = [float(rate) for rate in require_rates(state)]
    for value in asked:
        require_number("tx's learning_rate", value, at_least=0)
    if not any(asked):
        raise ValueError("tx's learning_rate must be above 0, got 0: give any guess")
    search = _Search(loss_fn, params, tx, batches, total_steps, probe, score_fn, trials_at_once, asked)
    found = search.run()
    if jax.process_index() == 0:
        _log.info("%s", found)
    return found


def _is_multi_steps(node: object) -> bool:
    return isinstance(node, optax.MultiStepsState)


class _Search:
    """One search."""

    def __init__(
        self,
        loss_fn: Loss,
        params: Any,
        tx: optax.GradientTransformationExtraArgs,
        batches: Iterable[Any],
        total_steps: int,
        probe: Any,
        score_fn: Loss | None,
        trials_at_once: int | None,
        asked: Sequence[float],
    ) -> None:
        self._places = Places(params)
        self._tx, self._asked, self._total_steps = tx, asked, total_steps
        self._params = self._places.put(params)
        self._batches = endless(batches)
        self._ahead = [self._places.put(next(self._batches))]  # its size tells how many trials there can be
        _require_scalar("loss_fn", loss_fn, self._params, self._ahead[0])
        count = self._places.count
        self._num_places = count * num_parts(count, size_of(self._ahead[0]) // count)
        self._sizes = lengths(total_steps, self._num_places)
        taken = (
            [self._places.put(probe)] if probe is not None else [self._next() for _ in range(_PROBE_STEPS)]
        )
        _require_scalar(
            "loss_fn" if score_fn is None else "score_fn", score_fn or loss_fn, self._params, taken[0]
        )
        self._probe, self._num_bad = taken, 0
        self._trials = Trials(
            loss_fn,
            score_fn or loss_fn,
            tx,
            self._places,
            num_trials=self._num_places,
            num_at_once=trials_at_once or self._num_places,
        )
        self._score_fn = jax.jit(score_fn or loss_fn)
        self._step = jax.jit(partial(one_step, loss_fn, tx))

    def run(self) -> FoundLR:
        """The ramp, then trials."""
        if len(self._probe) > 1:  # training batches, of which one may be bad
            finite = [b for b in self._probe if math.isfinite(float(self._score_fn(self._params, b)))]
            self._num_bad += len(self._probe) - len(finite)
            self._probe = finite or self._probe
        first_score = self._score(self._params)
        if not math.isfinite(first_score):
            raise NotFiniteError(
                "loss must be finite at the weights that the search starts from, but it is not: check the "
                "data and the model"
            )
        seen, lead, params = self._ramp()
        found, trials, num_steps = try_out(
            lambda lead, trial_steps: self._make_trials(lead, params, trial_steps),
            lead,
            first_score=first_score,
            sizes=self._sizes,
            ramp_steps=len(seen),
            total_steps=self._total_steps,
        )
        return FoundLR.of(
            found,
            self._asked,
            seen=seen,
            trials=trials,
            num_steps=num_steps,
            num_bad=self._num_bad,
            total_steps=self._total_steps,
        )

    def _ramp(self) -> tuple[list[tuple[float, float]], float, Any]:
        """Factors and losses; the factor of the lowest loss, and the parameters there."""
        ramp, seen = Ramp(), list[tuple[float, float]]()
        params = lowest = self._params
        state = self._tx.init(params)
        while not ramp.is_over:
            step, factor = ramp.num_steps, ramp_factor(ramp.num_steps, self._sizes.ramp)
            score = self._score(params, num_batches=1)
            value = score if math.isfinite(score) else math.inf
            ramp = next_ramp(ramp, value, self._sizes)
            seen.append((factor, value))
            if ramp.low_step == step:
                lowest = params
            if not ramp.is_over:
                rates = [factor * lr for lr in self._asked]
                params, state, loss = self._step(params, state, rates, self._next())
                self._num_bad += not math.isfinite(float(loss))  # the probe was finite with these weights
        return seen, ramp_factor(ramp.low_step, self._sizes.ramp), lowest

    def _make_trials(self, lead: float, params: Any, num_steps: int) -> list[Trial]:
        """From these parameters, one trial for each factor, each on its own part of the batches."""
        factors = trial_factors(lead, self._num_places * self._sizes.num_turns)
        scores: list[float] = []
        for turn in range(self._sizes.num_turns):
            here = factors[turn * self._num_places :][: self._num_places]
            batches = [self._next_whole() for _ in range(num_steps)]
            rates = [[factor * lr for lr in self._asked] for factor in here]
            made, num_bad = self._trials.make(params, rates, batches, self._probe)
            scores += made
            self._num_bad += num_bad
        return [Trial(f, s if math.isfinite(s) else None) for f, s in zip(factors, scores, strict=True)]

    def _score(self, params: Any, *, num_batches: int | None = None) -> float:
        """Loss on the probe, or on some of its batches."""
        return fmean(float(self._score_fn(params, batch)) for batch in self._probe[:num_batches])

    def _next(self) -> Any:
        return self._ahead.pop() if self._ahead else self._places.put(next(self._batches))

    def _next_whole(self) -> Any:
        """A batch with an example for every trial: the last one of an epoch may have fewer."""
        batch = self._next()
        while self._num_places > 1 and size_of(batch) < self._num_places:
            batch = self._next()
        return batch


def _require_scalar(name: str, function: Loss, params: Any, batch: Any) -> None:
    """Raise unless the function returns one real number for this batch."""
    result = jax.eval_shape(function, params, batch)
    if not isinstance(result, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{name} must return the loss alone, got {result}: leave out what it returns beside it"
        )
    if result.shape != () or not jnp.issubdtype(result.dtype, jnp.floating):
        raise ValueError(f"{name} must return one real number, got {result}: return the mean over the batch")

"""find_lr for JAX: the learning rate for a whole run, found by short trials before it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import optax  # pyright: ignore[reportMissingImports]

from hdet.checks import require_count, require_flag, require_kind
from hdet.jax.optax_state import parts_of, require_transformation, require_values
from hdet.jax.trainee import JaxTrainee, Loss
from hdet.search.driver import Search, endless, require_guess, require_length
from hdet.search.found import FoundLR
from hdet.search.progress import ProgressLine

_log = logging.getLogger(__name__)


def find_lr(
    loss_fn: Loss,
    params: Any,
    tx: optax.GradientTransformation,
    batches: Iterable[Any],
    *,
    total_steps: int,
    probe: Iterable[Any] | None = None,
    score_fn: Loss | None = None,
    trials_at_once: int | None = None,
    progress: bool = True,
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
        probe: held-out batches that trials are scored on. Without them the first few training batches are,
            which no trial then trains on.
        score_fn: what trials are scored by, such as the loss without dropout; None for ``loss_fn``.
        trials_at_once: how many trials are in memory; None for all of them, which are eight as a rule. Fewer
            take longer and find the same.
        progress: show on a terminal how far the search is, once it takes more than five seconds.

    >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=1e-4)
    >>> data = list(jax.random.normal(jax.random.key(0), (20, 16, 8)))
    >>> loss_fn = lambda w, x: jax.numpy.mean((x @ w - x.sum(axis=1)) ** 2)
    >>> found = find_lr(loss_fn, jax.numpy.zeros(8), tx, data, total_steps=500)
    >>> found.lr[0] > 1e-3, found.asked[0] < 1e-3
    (True, True)
    """
    require_length(total_steps)
    require_flag("progress", progress)
    if trials_at_once is not None:
        require_count("trials_at_once", trials_at_once)
    for name, function in (("loss_fn", loss_fn), ("score_fn", score_fn)):
        is_right = callable(function) or (name == "score_fn" and function is None)
        require_kind(f"{name} must be a function {name}(params, batch)", function, is_right)
    if probe is not None:
        is_data = isinstance(probe, Iterable) and not (
            isinstance(probe, (tuple, dict)) or hasattr(probe, "shape")
        )
        require_kind("probe must be a list of held-out batches or None", probe, is_data, "write [batch]")
    tracer = jax.core.Tracer  # pyright: ignore[reportAttributeAccessIssue]
    if any(isinstance(leaf, tracer) for leaf in jax.tree.leaves(params)):
        raise TypeError("params must be arrays, got tracers: call find_lr outside of jit, grad and vmap")
    tx = require_transformation(tx)
    state = tx.init(params)
    asked = [float(rate) for rate in require_values(state)]
    if parts_of(state, optax.MultiStepsState):
        raise ValueError(
            "tx must make a step of every batch, got optax.MultiSteps: pass what it was made from, and whole "
            "batches"
        )
    require_guess("tx's learning_rate", asked)
    trainee = JaxTrainee(loss_fn, score_fn, params, tx, asked, trials_at_once)
    put, is_writer = trainee.mesh.put, jax.process_index() == 0
    with ProgressLine(progress and is_writer) as line:
        found = Search(
            trainee,
            map(put, endless(batches)),
            probe=None if probe is None else [put(batch) for batch in probe],
            total_steps=total_steps,
            progress=line,
        ).run()
    if is_writer:
        _log.log(logging.WARNING if found.is_guess else logging.INFO, "%s", found)
    return found

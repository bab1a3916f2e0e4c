"""HeldOutWeightDecay for JAX: held-out data moves the weight decay while a model trains."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

from hdet.checks import require_count, require_kind
from hdet.errors import HdetWarning, warn
from hdet.jax.optax_state import AutoLRState, parts_of, read_values, write_values
from hdet.jax.trainee import Loss, checked
from hdet.jax.trial_mesh import size_of
from hdet.method import weight_decay as rule
from hdet.method.weight_decay import (
    FEW_EXAMPLES,
    NUM_PARTS,
    SCALES,
    DecayState,
    Look,
    least_strength,
    look_of,
    may_look,
    moved,
)

DECAY = "weight_decay"


class HeldOutWeightDecayState(NamedTuple):
    """Holds what :class:`HeldOutWeightDecay` keeps. Save it with parameters and optimizer state."""

    num_steps: int
    """Optimizer steps so far."""
    start: float
    """The strength that the run began with: weight decay times peak learning rate times steps."""
    known: DecayState
    """The strength now, and what the looks at held-out data have shown."""
    loss_total: jax.Array
    """Of the finite training losses since the last interval ended, and their number."""
    num_losses: jax.Array


class HeldOutWeightDecay:
    """Move the weight decay by what held-out data says, as :class:`hdet.HeldOutWeightDecay` does.

    Now and then the parameters are scored with those that decay 5 % smaller and 5 % larger. Where smaller
    ones score better, decay is added (:func:`hdet.method.weight_decay.moved`). The data must be held out, and
    the final test needs other data.

    The optimizer is that of :func:`hdet.jax.auto_lr`. It takes learning rate times weight decay from the
    weights in each step, as ``optax.inject_hyperparams(optax.adamw)(learning_rate=..., weight_decay=...)``
    does, and has one learning rate and one weight decay in its state.

    Args:
        loss_fn: ``loss_fn(params, batch)``, a scalar, without dropout.
        batches: held-out batches. They are read once and kept.
        total_steps: length of training in optimizer steps.
        mask: says which parameters decay, like ``mask`` of ``optax.adamw``: a tree of booleans, or a function
            that makes one of the parameters. None for all of them.

    >>> import optax
    >>> from hdet.jax import auto_lr
    >>> tx = optax.inject_hyperparams(optax.adamw)(learning_rate=0.1, weight_decay=0.01)
    >>> tx, params = auto_lr(tx, total_steps=100), jnp.ones(2)
    >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> steering = HeldOutWeightDecay(loss_fn, [jnp.ones((400, 2))], total_steps=100)
    >>> opt_state = tx.init(params)
    >>> state = steering.init(opt_state)
    >>> for _ in range(25):  # looks come after 20 and 25 steps, and must agree
    ...     opt_state, state = steering.step(opt_state, state, params, loss=1.0)
    >>> round(state.known.strength, 3), round(read_values(opt_state, "weight_decay")[0].item(), 3)
    (1.601, 0.16)
    """

    def __init__(self, loss_fn: Loss, batches: Iterable[Any], *, total_steps: int, mask: Any = None) -> None:
        require_kind("loss_fn must be a function loss_fn(params, batch)", loss_fn, callable(loss_fn))
        is_data = isinstance(batches, Iterable) and not hasattr(batches, "shape")
        require_kind("batches must be held-out batches, such as a list", batches, is_data)
        require_count("total_steps", total_steps)
        held = list(batches)
        num_examples = sum(map(size_of, held))
        if not held or not num_examples:
            raise ValueError("batches must hold at least one example, got none: give held-out data")
        if num_examples < FEW_EXAMPLES:
            warn(
                f"there are {num_examples} held-out examples: with fewer than {FEW_EXAMPLES} what they say "
                "is mostly chance. Give more held-out data",
                HdetWarning,
            )
        cuts = -(-NUM_PARTS // len(held))
        self._parts = [part for batch in held for part in _split(batch, cuts)]
        self._total_steps = total_steps
        self._rule = rule.HeldOutWeightDecay()
        score_fn = checked("loss_fn", loss_fn)

        @jax.jit
        def score(params: Any, scale: float, batch: Any) -> jax.Array:
            decays = True if mask is None else mask(params) if callable(mask) else mask
            return score_fn(
                jax.tree.map(
                    lambda is_scaled, part: jax.tree.map(lambda p: p * scale, part) if is_scaled else part,
                    decays,
                    params,
                ),
                batch,
            )

        self._score = score

    def init(self, opt_state: Any) -> HeldOutWeightDecayState:
        """Begin with the weight decay that the optimizer has. Raises if it cannot be moved."""
        rate, (decay, *others) = self._rate_of(opt_state), read_values(opt_state, DECAY) or [None]
        if decay is None or others:
            raise ValueError(
                f"opt_state must hold one {DECAY}, got {0 if decay is None else 1 + len(others)}: build the "
                "optimizer as optax.inject_hyperparams(optax.adamw)(learning_rate=1e-4, weight_decay=0.01)"
            )
        start = float(decay) * rate
        if not start > 0:
            raise ValueError(f"{DECAY} must be above 0 to be explored, got {float(decay):g}: begin with 0.01")
        zero = jnp.zeros(())
        return HeldOutWeightDecayState(0, start, DecayState(start), zero, zero)

    def step(
        self, opt_state: Any, state: HeldOutWeightDecayState, params: Any, loss: Any
    ) -> tuple[Any, HeldOutWeightDecayState]:
        """Count an optimizer step, and look at the held-out data if it is time. Call it outside of ``jit``.

        Args:
            opt_state: the optimizer's state after the step.
            state: of this steering.
            params: after the step.
            loss: the training loss of the step.

        Returns:
            Both states, the optimizer's with its new weight decay.
        """
        num_steps, total_steps = int(state.num_steps) + 1, self._total_steps
        is_finite = jnp.isfinite(loss)
        loss_total = state.loss_total + jnp.where(is_finite, loss, 0.0)
        num_losses = state.num_losses + is_finite
        state = state._replace(num_steps=num_steps, loss_total=loss_total, num_losses=num_losses)
        share_done = num_steps / total_steps
        if not self._rule.is_due(share_done, (num_steps - 1) / total_steps):
            return opt_state, state
        training_loss = float(loss_total / num_losses)
        zero = jnp.zeros(())
        state = state._replace(loss_total=zero, num_losses=zero)
        if not may_look(share_done):
            return opt_state, state
        look = self._look(params)
        if not all(map(math.isfinite, (*look, training_loss))):
            return opt_state, state
        known = moved(
            DecayState(*map(float, state.known)),
            look,
            training_loss=training_loss,
            share_done=share_done,
            least=least_strength(float(state.start)),
        )
        decay = known.strength / self._rate_of(opt_state)
        return write_values(opt_state, [decay], DECAY), state._replace(known=known)

    def _look(self, params: Any) -> Look:
        scores = [[self._score(params, scale, part) for part in self._parts] for scale in SCALES]
        low, high = jax.device_get(scores)
        return look_of(list(map(float, low)), list(map(float, high)))

    def _rate_of(self, opt_state: Any) -> float:
        """Give the peak learning rate times the steps of the run."""
        peaks = [float(peak) for auto in parts_of(opt_state, AutoLRState) for peak in auto.peaks]
        if len(peaks) != 1:
            raise ValueError(
                f"opt_state must hold one learning rate of hdet.jax.auto_lr, got {len(peaks)}: pass the "
                "state of hdet.jax.auto_lr(tx, ...), where tx has one learning rate"
            )
        return peaks[0] * self._total_steps


def _split(batch: Any, num_parts: int) -> list[Any]:
    """Several batches out of one, of two examples at least; arrays of another size go into all of them.

    >>> [part["x"].tolist() for part in _split({"x": jnp.arange(5), "scale": jnp.ones(2)}, 8)]
    [[0, 1], [2, 3, 4]]
    """
    size = size_of(batch)
    num_parts = min(num_parts, max(1, size // 2))
    edges = [i * size // num_parts for i in range(num_parts + 1)]

    def has_examples(leaf: Any) -> bool:
        return jnp.ndim(leaf) > 0 and leaf.shape[0] == size

    return [
        jax.tree.map(lambda x, a=start, b=end: x[a:b] if has_examples(x) else x, batch)
        for start, end in pairwise(edges)
    ]

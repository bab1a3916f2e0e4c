"""Models of the zoo as functions of their weights, with the weights and the optimizers of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import optax  # pyright: ignore[reportMissingImports]

__all__ = ["MODELS", "Model"]

Weights = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A problem of the zoo, written for JAX."""

    loss_fn: Callable[[Weights, Weights, Any], jax.Array]
    """Of the trained weights, the buffers and a batch."""
    optimizer: Callable[[Any], optax.GradientTransformation]
    """Of the learning rate; the zoo's own, with its constants."""
    best_lr: float
    """The best of the zoo's sweep, in ``research/zoo/records``. Starts are factors on it."""


def _linear(weights: Weights, name: str, x: jax.Array) -> jax.Array:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _conv(weights: Weights, name: str, x: jax.Array, dilation: int = 1) -> jax.Array:
    """A causal convolution of ``x``, which is (batch, channels, time)."""
    kernel = weights[f"{name}.weight"]
    past = dilation * (kernel.shape[-1] - 1)
    y = jax.lax.conv_general_dilated(
        x, kernel, (1,), [(past, 0)], rhs_dilation=(dilation,), dimension_numbers=("NCH", "OIH", "NCH")
    )
    return y + weights[f"{name}.bias"][:, None]


def _flights(weights: Weights, _: Weights, batch: Any) -> jax.Array:
    columns, classes = batch
    rows = [weights[f"tables.{i}.weight"][columns[:, i]] for i in range(columns.shape[1])]
    hidden = jax.nn.relu(_linear(weights, "network.0", jnp.concatenate(rows, axis=1)))
    logits = _linear(weights, "network.2", hidden)
    return optax.softmax_cross_entropy_with_integer_labels(logits, classes).mean()


def _weather(weights: Weights, _: Weights, batch: Any) -> jax.Array:
    hours, targets = batch
    x = _conv(weights, "first", hours.swapaxes(1, 2))
    for i, dilation in enumerate((1, 2, 4, 8)):
        x = x + jax.nn.relu(_conv(weights, f"layers.{i}", x, dilation))
    return jnp.mean((_linear(weights, "last", x[:, :, -1]) - targets) ** 2)


def _movies(weights: Weights, buffers: Weights, batch: Any) -> jax.Array:
    (users, movies), stars = batch[0].T, batch[1]
    vectors = [weights["users.weight"][users], weights["movies.weight"][movies]]
    hidden = jax.nn.relu(_linear(weights, "network.0", jnp.concatenate(vectors, axis=1)))
    taste = _linear(weights, "network.2", hidden)
    biases = weights["user_bias.weight"][users] + weights["movie_bias.weight"][movies]
    return jnp.mean((buffers["mean_rating"] + (taste + biases)[:, 0] - stars) ** 2)


MODELS = {
    "flights_tables": Model(_flights, partial(optax.adamw, weight_decay=0.0), 7.499e-3),
    "weather_tcn": Model(_weather, partial(optax.rmsprop, decay=0.99, eps_in_sqrt=False), 1.334e-3),
    "movies_factorization": Model(
        _movies, partial(optax.adagrad, initial_accumulator_value=0.0, eps=1e-20), 0.5623
    ),
}

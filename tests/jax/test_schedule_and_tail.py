"""auto_lr: the schedule and the tail of the recipe, under jit, with donated and with sharded weights."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import hdet
from hdet.method.recipe import Recipe, tail_steps

pytest.importorskip("jax", reason="jax is not installed; make test-jax runs them")
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import hdet.jax
from tests.jax.problem import batches, for_torch, loss_fn, params, torch_loss, torch_net

adamw = optax.inject_hyperparams(optax.adamw)
sgd = optax.inject_hyperparams(optax.sgd)


def step_of(tx, loss_fn=loss_fn):
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(weights, batch)
        updates, state = tx.update(gradients, state, weights, value=loss)
        return optax.apply_updates(weights, updates), state

    return step


def train(tx, weights, data, num_steps, state=None):
    """Weights and state after every step. What a step was given is donated, so they are copied."""
    step, seen = step_of(tx), []
    state = tx.init(weights) if state is None else state
    for i in range(num_steps):
        weights, state = step(weights, state, data[i % len(data)])
        seen.append((jax.tree.map(jnp.copy, weights), jax.tree.map(jnp.copy, state)))
    return seen


def assert_close(one, other, rtol=1e-12):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=1e-14), one, other)


@pytest.mark.parametrize("total_steps", [1, 2, 7, 100, 501])
def test_the_learning_rates_are_those_of_the_recipe(total_steps):
    tx, recipe = (
        hdet.jax.auto_lr(sgd(learning_rate=0.5), total_steps=total_steps),
        Recipe(total_steps=total_steps),
    )

    def step(carry, _):
        weights, state = carry
        updates, state = tx.update(jnp.ones(()), state, weights)
        return (optax.apply_updates(weights, updates), state), (updates, state.inner_state.hyperparams)

    weights = jnp.zeros(())
    _, (updates, written) = jax.lax.scan(step, (weights, tx.init(weights)), length=total_steps + 5)
    expected = [0.5 * recipe.shape(step) for step in range(total_steps + 5)]
    np.testing.assert_allclose(written["learning_rate"], expected, rtol=1e-12)
    np.testing.assert_allclose(updates, -np.array(expected), rtol=1e-12)


@pytest.mark.parametrize("total_steps", [40, 2000])
def test_the_mean_is_over_the_steps_of_the_tail(total_steps):
    tx = hdet.jax.auto_lr(sgd(learning_rate=0.1), total_steps=total_steps)

    def step(carry, gradient):
        weights, state = carry
        updates, state = tx.update(gradient, state, weights)
        weights = optax.apply_updates(weights, updates)
        return (weights, state), (weights, hdet.jax.eval_params(state, weights))

    gradients = jax.random.normal(jax.random.key(0), (total_steps, 3))
    weights = jnp.zeros(3)
    _, (seen, means) = jax.lax.scan(step, (weights, tx.init(weights)), gradients)
    tail = tail_steps(total_steps, Recipe.average_tail)
    np.testing.assert_array_equal(means[: tail[0] - 1], seen[: tail[0] - 1])  # before it, the weights
    for end in range(tail[0], total_steps + 1):
        taken = [seen[step - 1] for step in tail if step <= end]
        np.testing.assert_allclose(means[end - 1], np.mean(taken, axis=0), rtol=1e-10)


def test_search_and_run_are_those_of_torch():
    data, total_steps, net = batches(), 200, torch_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=1e-4)
    found = hdet.find_lr(net, optimizer, for_torch(data), torch_loss, total_steps=total_steps)
    auto = hdet.AutoLR(optimizer, total_steps=total_steps, model=net, found=found)
    for step in range(total_steps):
        loss = torch_loss(net, for_torch(data)[step % len(data)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)

    tx, weights = adamw(learning_rate=1e-4), jax.tree.map(jnp.array, params())
    found = hdet.jax.find_lr(loss_fn, weights, tx, data, total_steps=total_steps)
    tx = hdet.jax.auto_lr(tx, total_steps=total_steps, found=found)
    weights, state = train(tx, weights, data, total_steps)[-1]
    expected = {name: tensor.numpy() for name, tensor in net.state_dict().items()}
    assert_close(hdet.jax.eval_params(state, weights), expected, rtol=1e-9)


def test_sharded_weights_stay_sharded_and_train_the_same():
    tx = hdet.jax.auto_lr(adamw(learning_rate=1e-2), total_steps=40)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    specs = {
        "0.weight": PartitionSpec("model"),
        "0.bias": PartitionSpec("model"),
        "2.weight": PartitionSpec(None, "model"),
        "2.bias": PartitionSpec(),
    }
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    data = [jax.device_put(b, NamedSharding(mesh, PartitionSpec("data"))) for b in batches()]
    sharded, state = train(tx, jax.device_put(params(), shardings), data, 40)[-1]
    plain, plain_state = train(tx, jax.tree.map(jnp.array, params()), batches(), 40)[-1]
    assert_close(sharded, plain, rtol=1e-9)
    mean = hdet.jax.eval_params(state, sharded)
    assert_close(mean, hdet.jax.eval_params(plain_state, plain), rtol=1e-9)
    for name, sharding in shardings.items():
        assert state.tail_mean[name].sharding.is_equivalent_to(sharding, mean[name].ndim)
        assert mean[name].sharding.is_equivalent_to(sharding, mean[name].ndim)


def test_a_run_goes_on_from_its_state_without_what_was_found():
    data, weights = batches(), jax.tree.map(jnp.array, params())
    found = hdet.jax.find_lr(loss_fn, weights, adamw(learning_rate=1e-4), data, total_steps=60)
    whole = train(hdet.jax.auto_lr(adamw(learning_rate=1e-4), total_steps=60, found=found), weights, data, 60)
    saved = jax.tree.map(np.asarray, whole[57])  # the tail has begun
    weights, state = jax.tree.map(jnp.asarray, saved)
    again = hdet.jax.auto_lr(adamw(learning_rate=1e-4), total_steps=60)
    resumed = train(again, weights, data[58 % 50 :], 2, state=state)
    jax.tree.map(np.testing.assert_array_equal, resumed[-1], whole[-1])


def test_other_transformations_may_be_around_it_and_inside():
    inner = optax.chain(optax.clip_by_global_norm(1.0), adamw(learning_rate=1e-2))
    auto = hdet.jax.auto_lr(inner, total_steps=20)
    alone, around = (
        train(tx, jax.tree.map(jnp.array, params()), batches(), 20)[-1]
        for tx in (auto, optax.apply_if_finite(auto, 5))
    )
    assert_close(hdet.jax.eval_params(*reversed(alone)), hdet.jax.eval_params(*reversed(around)))


def test_accumulated_gradients_count_as_one_step():
    tx = optax.MultiSteps(hdet.jax.auto_lr(sgd(learning_rate=1e-2), total_steps=10), 2)
    weights, state = train(tx, jax.tree.map(jnp.array, params()), batches(), 20)[-1]
    assert state.inner_opt_state.count == 10
    mean = hdet.jax.eval_params(state, weights)
    assert_close(mean, weights)  # one step is the tail


def test_extra_arguments_reach_the_optimizer():
    tx = optax.chain(sgd(learning_rate=1e-2), optax.contrib.reduce_on_plateau(patience=2))
    _, state = train(hdet.jax.auto_lr(tx, total_steps=20), jax.tree.map(jnp.array, params()), batches(), 20)[
        -1
    ]
    assert np.isfinite(optax.tree.get(state, "best_value"))


def test_half_precision_is_averaged_in_single():
    tx = hdet.jax.auto_lr(sgd(learning_rate=1.0), total_steps=20)
    weights = jnp.zeros(2, jnp.bfloat16)
    state = jax.jit(tx.init)(weights)
    assert state.tail_mean.dtype == jnp.float32
    for _ in range(20):
        updates, state = tx.update(jnp.ones_like(weights), state, weights)
        weights = optax.apply_updates(weights, updates)
    assert weights.dtype == hdet.jax.eval_params(state, weights).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: hdet.jax.auto_lr(optax.sgd, total_steps=9), TypeError, "tx must be an optax.Gradient"),
        (lambda: hdet.jax.auto_lr(sgd(learning_rate=1), total_steps=0), ValueError, "total_steps must be"),
        (
            lambda: hdet.jax.auto_lr(sgd(learning_rate=1), total_steps=9, found=1e-3),
            TypeError,
            "found must be what hdet.jax.find_lr returned, or None, got 0.001",
        ),
        (
            lambda: hdet.jax.auto_lr(optax.sgd(0.1), total_steps=9).init(params()),
            ValueError,
            "tx must hold its learning_rate in its state",
        ),
        (
            lambda: hdet.jax.auto_lr(
                hdet.jax.auto_lr(sgd(learning_rate=0.1), total_steps=9), total_steps=9
            ).init(params()),
            ValueError,
            "tx must be the optimizer alone, got hdet.jax.auto_lr",
        ),
        (
            lambda: hdet.jax.eval_params(optax.sgd(0.1).init(params()), params()),
            ValueError,
            "state must hold that of one hdet.jax.auto_lr, got 0",
        ),
    ],
)
def test_bad_input_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_update_without_params_says_so():
    tx = hdet.jax.auto_lr(sgd(learning_rate=0.1), total_steps=9)
    with pytest.raises(ValueError, match="params must be given to update"):
        tx.update(params(), tx.init(params()))


def test_what_was_found_for_another_optimizer_is_refused():
    found = hdet.jax.find_lr(
        loss_fn,
        params(),
        optax.chain(sgd(learning_rate=0.1), sgd(learning_rate=1.0)),
        batches(),
        total_steps=50,
    )
    with pytest.raises(ValueError, match="tx must have the 2 learning rates that the search had, got 1"):
        hdet.jax.auto_lr(sgd(learning_rate=0.1), total_steps=50, found=found).init(params())

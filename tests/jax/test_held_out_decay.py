"""hdet.jax.HeldOutWeightDecay: the weight decay of torch's AutoLR, step for step."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed; make test-jax runs them")
import jax
import jax.numpy as jnp
import optax

import hdet
import hdet.jax
from hdet.jax.optax_state import read_values
from tests.jax.problem import batches, for_torch, loss_fn, params, torch_loss, torch_net

LR, DECAY, STEPS = 1e-2, 1e-2, 200
adamw = optax.inject_hyperparams(optax.adamw, static_args=("mask",))


def noisy(count, seed):
    noise = np.random.default_rng(seed + 10)
    return [(x, y + noise.normal(size=y.shape)) for x, y in batches(count=count, seed=seed)]


DATA, HELD_OUT = noisy(4, 0), noisy(7, 1)  # 128 rows to learn by heart; seven batches are two parts each


def is_matrix(weights):
    return {name: array.ndim > 1 for name, array in weights.items()}


def train(state=None, num_steps=STEPS, mask=None, shardings=None):
    """Weights and both states after each step from this one on, and the weight decay that it used."""
    tx = hdet.jax.auto_lr(adamw(learning_rate=LR, weight_decay=DECAY, mask=mask), total_steps=STEPS)
    steering = hdet.jax.HeldOutWeightDecay(loss_fn, HELD_OUT, total_steps=STEPS, mask=mask)
    if state is None:
        weights = jax.tree.map(jnp.array, params())
        weights = weights if shardings is None else jax.device_put(weights, shardings)
        opt_state = tx.init(weights)
        state = weights, opt_state, steering.init(opt_state)

    @jax.jit
    def step(weights, opt_state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(weights, batch)
        updates, opt_state = tx.update(gradients, opt_state, weights)
        return optax.apply_updates(weights, updates), opt_state, loss

    seen = []
    weights, opt_state, steered = state
    for i in range(int(steered.num_steps), num_steps):
        used = read_values(opt_state, "weight_decay")[0].item()
        weights, opt_state, loss = step(weights, opt_state, DATA[i % len(DATA)])
        opt_state, steered = steering.step(opt_state, steered, weights, loss)
        seen.append((weights, opt_state, steered, used))
    return seen


def train_torch(mask=None):
    net, used = torch_net(), []
    decayed, others = (
        [p for name, p in net.named_parameters() if (mask is None or p.ndim > 1) == is_decayed]
        for is_decayed in (True, False)
    )
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=LR)
    auto = hdet.AutoLR(
        optimizer,
        total_steps=STEPS,
        model=net,
        controllers=[hdet.HeldOutWeightDecay()],
        probe=hdet.Probe(for_torch(HELD_OUT), torch_loss),
        sync_every=5,
    )
    for step in range(STEPS):
        used.append(optimizer.param_groups[0]["weight_decay"])
        loss = torch_loss(net, for_torch(DATA)[step % len(DATA)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)
    return used, {name: tensor.numpy() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("mask", [None, is_matrix], ids=["all decay", "matrices decay"])
def test_the_weight_decay_is_that_of_torch(mask):
    seen, (expected, weights) = train(mask=mask), train_torch(mask)
    used = [row[3] for row in seen]
    np.testing.assert_allclose(used, expected, rtol=1e-8)
    assert used[:40] == [DECAY] * 40 and max(used) > 10 * DECAY  # the first look comes after 40 steps
    assert len(set(used)) > 8
    mean = hdet.jax.eval_params(seen[-1][1], seen[-1][0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), mean, weights)


def test_a_run_goes_on_from_its_states():
    whole = train()
    saved = jax.tree.map(np.asarray, whole[104][:3])
    resumed = train(jax.tree.map(jnp.asarray, saved))
    assert len(resumed) == STEPS - 105
    jax.tree.map(np.testing.assert_array_equal, resumed[-1], whole[-1])


def test_sharded_weights_have_the_same_weight_decay():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("model",))
    spec = jax.sharding.PartitionSpec
    specs = {
        "0.weight": spec("model"),
        "0.bias": spec("model"),
        "2.weight": spec(None, "model"),
        "2.bias": spec(),
    }
    shardings = {name: jax.sharding.NamedSharding(mesh, one) for name, one in specs.items()}
    sharded, plain = (train(num_steps=60, shardings=one) for one in (shardings, None))
    np.testing.assert_allclose([row[3] for row in sharded], [row[3] for row in plain], rtol=1e-8)
    assert sharded[-1][3] > DECAY


def test_what_is_not_finite_moves_nothing():
    tx = hdet.jax.auto_lr(adamw(learning_rate=LR, weight_decay=DECAY), total_steps=STEPS)
    opt_state, weights = tx.init(params()), params()
    steering = hdet.jax.HeldOutWeightDecay(loss_fn, HELD_OUT, total_steps=STEPS)
    spoilt = jax.tree.map(lambda p: p * np.nan, weights)
    for bad_loss, at in ((np.nan, weights), (1.0, spoilt)):
        now, state = opt_state, steering.init(opt_state)
        for _ in range(60):
            now, state = steering.step(now, state, at, bad_loss)
        assert state.num_steps == 60 and state.known == (state.start, 0.0, 0.0, 0.0, 0.0)
        assert read_values(now, "weight_decay")[0] == DECAY
    # One bad loss among good ones is left out.
    now, state = opt_state, steering.init(opt_state)
    for step in range(40):
        now, state = steering.step(now, state, weights, np.nan if step == 33 else 0.5)
    assert state.known.num_looks == 1
    held_out = np.mean([loss_fn(weights, batch) for batch in HELD_OUT])
    assert state.known.gap == pytest.approx(1 - 0.5 / held_out, rel=1e-2)


def steering_of(tx):
    tx = hdet.jax.auto_lr(tx, total_steps=9)
    return hdet.jax.HeldOutWeightDecay(loss_fn, HELD_OUT, total_steps=9).init(tx.init(params()))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: steering_of(adamw(learning_rate=LR, weight_decay=0.0)),
            ValueError,
            "must be above 0 .* got 0",
        ),
        (
            lambda: steering_of(optax.inject_hyperparams(optax.sgd)(learning_rate=LR)),
            ValueError,
            "opt_state must hold one weight_decay, got 0",
        ),
        (
            lambda: hdet.jax.HeldOutWeightDecay(loss_fn, HELD_OUT, total_steps=9).init(
                adamw(learning_rate=LR).init(params())
            ),
            ValueError,
            "opt_state must hold one learning rate of hdet.jax.auto_lr, got 0",
        ),
        (
            lambda: hdet.jax.HeldOutWeightDecay(loss_fn, [], total_steps=9),
            ValueError,
            "batches must hold at least one example, got none",
        ),
        (
            lambda: hdet.jax.HeldOutWeightDecay(loss_fn, jnp.ones((300, 8)), total_steps=9),
            TypeError,
            "batches must be held-out batches",
        ),
        (
            lambda: hdet.jax.HeldOutWeightDecay(loss_fn, HELD_OUT, total_steps=0),
            ValueError,
            "total_steps must be",
        ),
    ],
)
def test_bad_input_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_few_examples_are_told():
    with pytest.warns(hdet.HdetWarning, match="there are 32 held-out examples"):
        hdet.jax.HeldOutWeightDecay(loss_fn, HELD_OUT[:1], total_steps=9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hdet.jax.HeldOutWeightDecay(loss_fn, HELD_OUT, total_steps=9)

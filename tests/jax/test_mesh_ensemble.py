"""Ensemble for JAX: eight devices train as the plain reference of the method does, to 1e-12."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import hdet
from hdet.method import reference
from hdet.method.fan_out import multipliers, permutation
from hdet.round_record import ComparingRecord

pytest.importorskip("jax", reason="jax is not installed; make test-jax runs them")
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hdet.jax

N, EVERY, TOTAL, START, SPREAD, SEED = 8, 5, 40, 10, 1 / 9, 3
AXES = ("replica", "model")
RATES = {"bias": 0.02, "weight": 0.05}
PAPER = hdet.Controller(form="paper", start=START, temperature=0.1, step_size=0.5, end=0.95**6)
OPTIMIZERS = {
    "sgd": (optax.sgd, reference.sgd()),
    "momentum": (partial(optax.sgd, momentum=0.9), reference.sgd(momentum=0.9)),
    "adam": (optax.adam, reference.adam()),
    "adamw": (partial(optax.adamw, weight_decay=0.1), reference.adam(decoupled_weight_decay=0.1)),
}


def shape(count):
    return 0.2 + 0.8 * count / TOTAL


def start():
    generator = np.random.default_rng(0)
    return {"bias": generator.normal(size=2), "weight": generator.normal(size=(3, 2))}


def batch(replica, step):
    inputs = np.random.default_rng([replica, step]).normal(size=(4, 3))
    return inputs, np.sin(inputs[:, :2])


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch[0] @ params["weight"]) + params["bias"] - batch[1]) ** 2)


def rows_of(step):
    parts = [batch(r, step) for r in range(N)]
    return tuple(np.stack(part) for part in zip(*parts, strict=True))


def tx_of(make, num_groups=1):
    inject = optax.inject_hyperparams(make)
    if num_groups == 1:
        return inject(learning_rate=RATES["weight"])
    return optax.multi_transform(
        {n: inject(learning_rate=lr) for n, lr in RATES.items()}, {n: n for n in RATES}
    )


def mesh_of():
    return Mesh(np.array(jax.devices()), ("replica",))


def on_mesh(function, mesh=None):
    spec = PartitionSpec("replica")
    return jax.jit(jax.shard_map(jax.vmap(function), mesh=mesh or mesh_of(), in_specs=spec, out_specs=spec))


def on_one_device(function):
    return jax.jit(jax.vmap(function, axis_name="replica"))


def step_of(tx, share=True, loss_fn=loss_fn):
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        if share:
            gradients = jax.lax.pmean(gradients, "replica")
        updates, state = tx.update(gradients, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    return step


def train(ensemble, tx, place=on_mesh, total=TOTAL, data=rows_of, share=True, params=None):
    """Parameters of all replicas, their state, the values that they used, and the records."""
    tx = ensemble.wrap(tx)
    step, converge = place(step_of(tx, share)), place(ensemble.converge)
    params = start() if params is None else params
    params, state = ensemble.repeat((params, tx.init(params)), mesh_of() if place is on_mesh else None)
    values, records = [], []
    for t in range(1, total + 1):
        params, state = step(params, state, data(t))
        values.append(np.stack(hdet.jax.optax_state.read_values(state.inner_state), axis=1))
        if t % EVERY == 0 or t == total:
            params, state = converge(params, state)
        if t % EVERY == 0:
            state, record = ensemble.steer(state)
            records.append(record)
    return params, state, values, records


def run_reference(optimizer, num_groups, controller):
    names = list(RATES)
    gradient_of = jax.jit(jax.value_and_grad(loss_fn))

    def whole(theta):
        if num_groups == 2:
            return dict(zip(names, theta, strict=True))
        return {"bias": theta[0][:2], "weight": theta[0][2:].reshape(3, 2)}

    def gradient(theta, replica, step):
        loss, gradients = gradient_of(whole(theta), batch(replica, step))
        flat = [np.asarray(gradients[name]) for name in names]
        return float(loss), flat if num_groups == 2 else [np.concatenate([x.ravel() for x in flat])]

    first = [start()[name] for name in names]
    lrs = list(RATES.values()) if num_groups == 2 else [RATES["weight"]]
    trace = reference.train(
        first if num_groups == 2 else [np.concatenate([x.ravel() for x in first])],
        gradient=gradient,
        optimizer=optimizer,
        schedule=lambda t: [lr * shape(t) for lr in lrs],
        num_replicas=N,
        spread=SPREAD,
        sync_every=EVERY,
        total_steps=TOTAL,
        names=["lr"] if num_groups == 1 else ["lr.0", "lr.1"],
        controller=controller,
        seed=SEED,
    )
    return trace, [whole(theta) for theta in trace.parameters]


def assert_close(one, other):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), one, other)


CASES = [
    ("sgd", 1, None, on_mesh),
    ("sgd", 1, PAPER, on_mesh),
    ("sgd", 2, PAPER, on_one_device),
    ("momentum", 1, PAPER, on_mesh),
    ("adam", 2, PAPER, on_mesh),
    ("adamw", 1, PAPER, on_mesh),
    ("adamw", 2, None, on_one_device),
    ("sgd", 1, hdet.Controller(form="paper", start=START), on_mesh),  # the temperature follows the losses
]


@pytest.mark.parametrize("name, num_groups, controller, place", CASES)
def test_it_is_the_reference(name, num_groups, controller, place):
    make, optimizer = OPTIMIZERS[name]
    trace, expected = run_reference(optimizer, num_groups, controller)
    ensemble = hdet.jax.Ensemble(
        num_replicas=N,
        sync_every=EVERY,
        spread=SPREAD,
        schedule=shape,
        controllers=[controller] if controller else [],
        total_steps=TOTAL,
        seed=SEED,
    )
    params, _, values, records = train(ensemble, tx_of(make, num_groups), place)
    assert_close(values, [np.array(step.values) for step in trace.steps])
    assert_close(params, jax.tree.map(lambda *x: np.stack(x), *expected))
    assert len(records) == len(trace.rounds)
    for record, expected in zip(records, trace.rounds, strict=True):
        assert record.step == expected.step
        assert_close(record.losses, expected.losses)
        assert_close(list(record.base.values()), expected.bases)
        compared = record.controllers.get("comparing", ComparingRecord())
        if compared.weights:
            assert_close(compared.weights, expected.weights)
            assert_close(list(compared.velocity.values()), expected.velocities)
            assert_close(list(compared.signal.values()), expected.signals)


def test_every_round_has_its_own_permutation_for_each_value():
    ensemble = hdet.jax.Ensemble(
        num_replicas=N, sync_every=EVERY, spread={"learning_rate": 0.5, "weight_decay": 0.25}, seed=SEED
    )
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=0.1, weight_decay=0.2)
    _, state, _, records = train(ensemble, tx, total=10)
    for k, record in enumerate(records):
        for name, spread in (("lr", 0.5), ("weight_decay", 0.25)):
            order = permutation(N, SEED, k, name)
            assert record.multipliers[name] == [multipliers(N, spread)[i] for i in order]
    # What the optimizer used last is what the record says of the last round.
    used = state.inner_state.hyperparams
    np.testing.assert_allclose(used["weight_decay"], records[-1].values["weight_decay"], rtol=1e-12)
    np.testing.assert_allclose(used["learning_rate"], records[-1].values["lr"], rtol=1e-12)
    order = permutation(N, SEED, 2, "lr")
    np.testing.assert_allclose(state.multipliers[0, 0], [multipliers(N, 0.5)[i] for i in order])


def test_without_a_spread_it_is_plain_training():
    ensemble = hdet.jax.Ensemble(num_replicas=N, sync_every=EVERY, spread=0.0)
    params, *_ = train(ensemble, tx_of(optax.adam))
    tx = optax.adam(RATES["weight"])
    plain, state = start(), tx.init(start())

    @partial(jax.vmap, axis_name="replica", in_axes=(None, 0))
    def gradient_of(params, batch):
        return jax.lax.pmean(jax.grad(loss_fn)(params, batch), "replica")

    for t in range(1, TOTAL + 1):
        shared = jax.tree.map(lambda x: x[0], gradient_of(plain, rows_of(t)))
        updates, state = tx.update(shared, state, plain)
        plain = optax.apply_updates(plain, updates)
    assert_close(params, jax.tree.map(lambda x: np.stack([x] * N), plain))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.stack([x[0]] * N)), params)


def spoilt(step, replica=2):
    inputs, targets = rows_of(step)
    targets[replica] = math.nan
    return inputs, targets


def test_a_replica_without_a_finite_loss_is_left_out_and_gets_the_mean():
    ensemble = hdet.jax.Ensemble(
        num_replicas=N,
        sync_every=EVERY,
        gradients="local",
        controllers=[replace(PAPER, start=0)],
        total_steps=TOTAL,
    )
    params, state, _, records = train(ensemble, tx_of(optax.adam), total=EVERY, data=spoilt, share=False)
    alone = hdet.jax.Ensemble(num_replicas=N, sync_every=EVERY, gradients="local")
    tx = alone.wrap(tx_of(optax.adam))
    rows, rows_state = alone.repeat((start(), tx.init(start())))
    for t in range(1, EVERY + 1):
        rows, rows_state = on_one_device(step_of(tx, share=False))(rows, rows_state, rows_of(t))
    others = [r for r in range(N) if r != 2]

    def mean(x):
        return np.stack([np.mean(np.asarray(x)[others], axis=0)] * N)

    assert_close(params, jax.tree.map(mean, rows))
    moments, expected = (optax.tree.get(s.inner_state, "mu") for s in (state, rows_state))
    assert_close(moments, jax.tree.map(mean, expected))  # as gradients are local
    (record,) = records
    assert record.excluded == {2: "parameters are not finite"}
    assert record.losses[2] is None and record.num_nonfinite_losses == [0, 0, EVERY, 0, 0, 0, 0, 0]
    weights = record.section(ComparingRecord).weights
    assert weights[2] == 0 and sum(weights) == pytest.approx(1)


def test_a_loss_that_is_not_finite_is_left_out_of_the_replicas_mean():
    ensemble = hdet.jax.Ensemble(num_replicas=2, sync_every=2)
    tx = ensemble.wrap(tx_of(optax.sgd))
    params, state = ensemble.repeat((jnp.ones(2), tx.init(jnp.ones(2))))

    def step(params, state, loss):
        return tx.update(jnp.zeros(2), state, params, value=loss)[1]

    for losses in ([1.0, 5.0], [3.0, math.inf]):
        state = on_one_device(step)(params, state, jnp.array(losses))
    _, state = on_one_device(ensemble.converge)(params, state)
    _, record = ensemble.steer(state)
    assert record.losses == [2.0, 5.0]
    assert record.num_nonfinite_losses == [0, 1] and not record.excluded


def test_shared_gradients_leave_what_the_optimizer_keeps():
    ensemble = hdet.jax.Ensemble(num_replicas=N, sync_every=EVERY)
    _, state, *_ = train(ensemble, tx_of(optax.adam), total=EVERY)
    for x in jax.tree.leaves(optax.tree.get(state.inner_state, "mu")):
        np.testing.assert_allclose(x, np.stack([x[0]] * N), rtol=1e-12)


def test_where_no_replica_is_healthy_it_stops():
    ensemble = hdet.jax.Ensemble(num_replicas=N, sync_every=EVERY)
    with pytest.raises(hdet.AllReplicasFailedError, match=r"no replica is healthy: .*spread its NaN to all"):
        train(ensemble, tx_of(optax.sgd), data=spoilt)


def test_converging_within_a_round_does_not_end_it():
    ensemble = hdet.jax.Ensemble(num_replicas=N, sync_every=EVERY, spread=SPREAD)
    tx = ensemble.wrap(tx_of(optax.sgd))
    step, converge = on_mesh(step_of(tx)), on_mesh(ensemble.converge)
    params, state = ensemble.repeat((start(), tx.init(start())))
    for t in range(1, EVERY + 1):
        params, state = step(params, state, rows_of(t))
        if t == 2:
            params, state = converge(params, state)
            np.testing.assert_array_equal(params["bias"], np.stack([params["bias"][0]] * N))
            with pytest.raises(
                ValueError, match="after a round of 5 steps, got one of 2: call converge, then"
            ):
                ensemble.steer(state)
    with pytest.raises(ValueError, match="state must be what converge returned"):
        ensemble.steer(state)
    params, state = converge(params, state)
    state, record = ensemble.steer(state)
    assert record.step == EVERY and record.num_nonfinite_losses == [0] * N


def test_a_round_may_be_one_scan():
    ensemble = hdet.jax.Ensemble(
        num_replicas=N, sync_every=EVERY, controllers=[PAPER], total_steps=TOTAL, schedule=shape
    )
    expected, *_ = train(ensemble, tx_of(optax.adam), total=4 * EVERY)
    tx = ensemble.wrap(tx_of(optax.adam))

    def train_round(params, state, batches):
        step = step_of(tx)
        (params, state), _ = jax.lax.scan(lambda carry, b: (step(*carry, b), None), (params, state), batches)
        return ensemble.converge(params, state)

    train_round = on_mesh(train_round)
    params, state = ensemble.repeat((start(), tx.init(start())), mesh_of())
    for k in range(4):
        steps = [rows_of(k * EVERY + t) for t in range(1, EVERY + 1)]
        params, state = train_round(params, state, jax.tree.map(lambda *x: np.stack(x, axis=1), *steps))
        state, _ = ensemble.steer(state)
    assert_close(params, expected)


def test_a_run_goes_on_from_what_was_saved():
    ensemble = hdet.jax.Ensemble(
        num_replicas=N, sync_every=EVERY, controllers=[PAPER], total_steps=TOTAL, schedule=shape
    )
    whole, *_ = train(ensemble, tx_of(optax.adam))
    tx = ensemble.wrap(tx_of(optax.adam))
    step, converge = on_mesh(step_of(tx)), on_mesh(ensemble.converge)
    params, state = ensemble.repeat((start(), tx.init(start())))
    for t in range(1, TOTAL + 1):
        if t == 23:  # within a round
            saved = jax.device_get((params, state))
            params, state = jax.tree.map(jnp.array, saved)
        params, state = step(params, state, rows_of(t))
        if t % EVERY == 0:
            params, state = converge(params, state)
            state, _ = ensemble.steer(state)
    jax.tree.map(np.testing.assert_array_equal, params, whole)


@pytest.mark.parametrize("has_explicit_axes", [False, True])
def test_a_replica_may_span_devices(has_explicit_axes):
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = jax.make_mesh((4, 2), AXES) if has_explicit_axes else Mesh(devices, AXES)
    ensemble = hdet.jax.Ensemble(num_replicas=4, sync_every=1)
    tx, spec = ensemble.wrap(tx_of(optax.adam)), PartitionSpec("replica")

    def round_of(params, state, batch):
        return ensemble.converge(*step_of(tx)(params, state, batch))

    def run(place, put, params, state):
        for t in (1, 2):
            params, state = place(params, state, put(jax.tree.map(lambda x: x[:4], rows_of(t))))
            state, _ = ensemble.steer(state)
        return params, state

    params, state = ensemble.repeat((start(), tx.init(start())), mesh)
    if not has_explicit_axes:
        split = NamedSharding(mesh, PartitionSpec("replica", None, "model"))
        params["weight"] = jax.device_put(params["weight"], split)
    on_axis = jax.shard_map(
        jax.vmap(round_of), mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"replica"}
    )
    put = partial(jax.device_put, device=NamedSharding(mesh, spec))
    params, state = run(jax.jit(on_axis), put, params, state)
    assert {shard.data.shape[0] for shard in state.multipliers.addressable_shards} == {1}
    alone = run(on_one_device(round_of), lambda x: x, *ensemble.repeat((start(), tx.init(start()))))
    assert_close(params, alone[0])


def test_half_precision_is_averaged_in_single():
    ensemble = hdet.jax.Ensemble(num_replicas=N, sync_every=1)
    rows = jnp.array([1.0] + [1.0078125] * 7, jnp.bfloat16)
    tx = ensemble.wrap(tx_of(optax.sgd))
    state = ensemble.repeat(tx.init(jnp.zeros((), jnp.bfloat16)))
    mean, state = on_mesh(ensemble.converge)(rows, state)
    assert mean.dtype == jnp.bfloat16 and mean.tolist() == [1.0078125] * N
    assert state.multipliers.dtype == jnp.float32


def test_float32_is_close_to_float64():
    ensemble = hdet.jax.Ensemble(num_replicas=N, sync_every=EVERY, controllers=[PAPER], total_steps=TOTAL)
    double, *_ = train(ensemble, tx_of(optax.adam))
    with jax.enable_x64(False):
        single, *_ = train(ensemble, tx_of(optax.adam))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), single, double)


def test_a_base_that_would_fall_below_zero_is_halved_and_told():
    settings = hdet.Controller(form="paper", step_size=100.0, momentum=0.0, temperature=1e-6)
    ensemble = hdet.jax.Ensemble(num_replicas=2, sync_every=1, spread=0.5, controllers=[settings])
    tx = ensemble.wrap(tx_of(optax.sgd))
    params, state = ensemble.repeat((jnp.ones(2), tx.init(jnp.ones(2))))
    lower = np.argmin(state.multipliers[0, 0])
    losses = jnp.array([1.0, 1.0]).at[lower].set(0.0)
    state = on_one_device(lambda p, s, v: tx.update(p, s, p, value=v)[1])(params, state, losses)
    _, state = on_one_device(ensemble.converge)(params, state)
    state, record = ensemble.steer(state)
    assert record.base["lr"] == pytest.approx(RATES["weight"] / 2)
    assert record.section(ComparingRecord).limited == {
        "lr": "the base must stay above zero, so it was halved"
    }


def test_a_loss_that_is_the_same_everywhere_is_told():
    ensemble = hdet.jax.Ensemble(num_replicas=2, sync_every=1, controllers=[hdet.Controller(form="paper")])
    tx = ensemble.wrap(tx_of(optax.sgd))
    params, state = ensemble.repeat((jnp.ones(2), tx.init(jnp.ones(2))))
    state = on_one_device(lambda p, s: tx.update(p, s, p, value=1.0)[1])(params, state)
    _, state = on_one_device(ensemble.converge)(params, state)
    with pytest.warns(hdet.IdenticalLossWarning, match="pass each replica's own loss as value="):
        ensemble.steer(state)


def test_warm_start_has_the_scale_of_equation_10():
    rows = {"a": jnp.full((N, 5000), 3.0), "step": jnp.arange(N)}
    noisy = on_mesh(partial(hdet.jax.warm_start, noise_scale=0.02, seed=1))(rows)
    noise = np.asarray(noisy["a"] - rows["a"])
    np.testing.assert_allclose(noise.std(axis=1), 0.02 * 3.0, rtol=0.05)  # norm / sqrt(d) is 3
    assert abs(np.corrcoef(noise) - np.eye(N)).max() < 0.1
    assert noisy["step"].tolist() == list(range(N))
    again = on_one_device(partial(hdet.jax.warm_start, noise_scale=0.02, seed=1))(rows)
    np.testing.assert_allclose(again["a"], noisy["a"], rtol=1e-12)


def test_records_are_written_and_read(tmp_path):
    _, _, _, records = train(
        hdet.jax.Ensemble(num_replicas=N, sync_every=EVERY, controllers=[PAPER], total_steps=TOTAL),
        tx_of(optax.sgd),
    )
    sink = hdet.JsonlSink(tmp_path / "records.jsonl")
    for record in records:
        sink.write(record)
    assert list(hdet.read_records(tmp_path / "records.jsonl")) == records


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"num_replicas": 0}, ValueError, "num_replicas must be an integer of at least 1, got 0"),
        ({"sync_every": 2.0}, TypeError, "sync_every must be .* write 2"),
        ({"spread": 1.2}, ValueError, r"spread of learning_rate must be a number in \[0, 1\), got 1.2"),
        ({"spread": {"weight_decay": -1}}, ValueError, "spread of weight_decay must be"),
        (
            {"spread": {"weight_decay": 0.5}, "schedule": shape},
            ValueError,
            "spread must name the learning_rate where it has a schedule, got .* add 'learning_rate': 0.0",
        ),
        ({"gradients": "own"}, ValueError, "gradients must be one of 'shared', 'local', got 'own'"),
        ({"seed": -1}, ValueError, "seed must be"),
        (
            {"controllers": "paper"},
            ValueError,
            "controllers must be .hdet.Controller\\(form='paper'\\). .* got 'paper'",
        ),
        (
            {"controllers": [hdet.Controller()]},
            ValueError,
            "with a number as end, or empty, got .*form='log'",
        ),
        (
            {"controllers": [hdet.Controller(form="paper", end="floor")]},
            ValueError,
            "with a number as end, or empty, got .*end='floor'",
        ),
    ],
)
def test_bad_settings_are_named(change, error, message):
    with pytest.raises(error, match=message):
        hdet.jax.Ensemble(**{"num_replicas": 8, "sync_every": 5} | change)


@pytest.mark.parametrize(
    "tx, spread, error, message",
    [
        (optax.sgd, 0.1, TypeError, "tx must be an optax.GradientTransformation"),
        (optax.sgd(0.1), 0.1, ValueError, "tx must hold its learning_rate in its state"),
        (tx_of(optax.sgd), {"weight_decay": 0.1}, ValueError, "tx must hold its weight_decay in its state"),
        (
            hdet.jax.auto_lr(tx_of(optax.sgd), total_steps=100),
            0.1,
            ValueError,
            "tx must be the optimizer alone, got hdet.jax.auto_lr: pass what it was made from",
        ),
        (
            optax.inject_hyperparams(optax.sgd)(learning_rate=shape),
            0.1,
            ValueError,
            r"got a schedule: .*hdet.jax.Ensemble\(schedule=",
        ),
    ],
)
def test_bad_optimizers_are_named(tx, spread, error, message):
    with pytest.raises(error, match=message):
        hdet.jax.Ensemble(num_replicas=8, sync_every=5, spread=spread).wrap(tx).init(start())


def test_a_wrapped_optimizer_is_refused_by_the_search_and_the_recipe():
    tx = hdet.jax.Ensemble(num_replicas=8, sync_every=5).wrap(tx_of(optax.sgd))
    with pytest.raises(ValueError, match=r"tx must be the optimizer alone, got hdet.jax.Ensemble"):
        hdet.jax.auto_lr(tx, total_steps=100).init(start())
    with pytest.raises(ValueError, match=r"tx must be the optimizer alone, got hdet.jax.Ensemble"):
        hdet.jax.find_lr(loss_fn, start(), tx, [batch(0, 0)], total_steps=100)


def test_bad_places_and_calls_are_named():
    ensemble = hdet.jax.Ensemble(num_replicas=4, sync_every=5)
    tx = ensemble.wrap(tx_of(optax.sgd))
    state = tx.init(start())
    with pytest.raises(
        TypeError, match="value must be this replica's loss, got None of type NoneType: pass value=loss"
    ):
        tx.update(start(), state, start())
    with pytest.raises(ValueError, match=r"the axis 'replica', which is None here, got 4: call .*shard_map"):
        tx.update(start(), state, start(), value=1.0)
    with pytest.raises(ValueError, match="which is None here"):
        ensemble.converge(start(), state)
    rows = jax.tree.map(lambda x: jnp.stack([x] * N), (start(), state))
    with pytest.raises(
        ValueError, match="num_replicas must be the size of the axis 'replica', which is 8 here, got 4"
    ):
        on_one_device(ensemble.converge)(*rows)

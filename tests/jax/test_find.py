"""find_lr for JAX: the same answer as with torch, on one device and on eight."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import hdet

pytest.importorskip("jax", reason="jax is not installed; make test-jax runs them")
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hdet.jax
from tests.jax.problem import batches, for_torch, loss_fn, params, torch_loss, torch_net


def adamw(learning_rate):
    return optax.adamw(learning_rate, weight_decay=0.01)


def sgd(learning_rate):
    return optax.sgd(learning_rate, momentum=0.9)


TORCH = {
    adamw: lambda groups, lr: torch.optim.AdamW(groups, lr=lr, weight_decay=0.01),
    sgd: lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
}


def tx_of(make=adamw, lr=1e-4):
    return optax.inject_hyperparams(make)(learning_rate=lr)


def found_by_torch(data, *, make=adamw, lr=1e-4, **settings):
    net = torch_net()
    optimizer = TORCH[make](net.parameters(), lr)
    return hdet.find_lr(net, optimizer, for_torch(data), torch_loss, **settings)


def assert_same(one, other):
    assert one.reason == other.reason
    assert one.num_steps == other.num_steps
    for field in ("lr", "low", "high", "asked", "ramp"):
        np.testing.assert_allclose(getattr(one, field), getattr(other, field), rtol=1e-6)
    assert [s is None for _, s in one.trials] == [s is None for _, s in other.trials]
    np.testing.assert_allclose(
        np.array(one.trials, dtype=float), np.array(other.trials, dtype=float), rtol=1e-6
    )


@pytest.mark.parametrize("make", [sgd, adamw])
def test_the_answer_is_that_of_torch(make):
    data = batches()
    found = hdet.jax.find_lr(loss_fn, params(), tx_of(make), data, total_steps=1000)
    assert isinstance(found, hdet.FoundLR)
    assert_same(found, found_by_torch(data, make=make, total_steps=1000))
    assert found.lr[0] > 10 * 1e-4


def test_the_answer_is_that_of_torch_with_a_probe_and_small_batches():
    # Batches of three leave room for three trials at a time, so that there are two turns. The start is too
    # high, so that some trials end with a loss that is not finite.
    data, (probe,) = batches(size=3), batches(size=64, count=1, seed=1)
    settings = {"make": sgd, "lr": 30.0, "total_steps": 300}
    found = hdet.jax.find_lr(loss_fn, params(), tx_of(sgd, 30.0), data, total_steps=300, probe=[probe])
    expected = found_by_torch(data, probe=for_torch([probe]), **settings)
    assert_same(found, expected)
    assert len(found.trials) == 6


def test_bad_batches_are_left_out_as_with_torch():
    data = batches()
    for step in (2, 20, 47):
        data[step][0][5] = math.nan
    found = hdet.jax.find_lr(loss_fn, params(), tx_of(), data, total_steps=1000)
    assert_same(found, found_by_torch(data, total_steps=1000))
    assert "batches whose loss is not finite were left out" in found.reason


def replicated(mesh):
    return jax.device_put(params(), NamedSharding(mesh, PartitionSpec()))


def test_eight_devices_find_what_one_finds():
    one = hdet.jax.find_lr(loss_fn, params(), tx_of(), batches(), total_steps=500)
    for mesh in (Mesh(np.array(jax.devices()), ("data",)), jax.make_mesh((8,), ("data",))):
        sharded = [jax.device_put(b, NamedSharding(mesh, PartitionSpec("data"))) for b in batches()]
        eight = hdet.jax.find_lr(loss_fn, replicated(mesh), tx_of(), sharded, total_steps=500)
        assert_same(eight, one)


def test_each_device_holds_one_trial():
    from hdet.jax.trial_mesh import TrialMesh

    weights = replicated(jax.make_mesh((8,), ("data",)))
    mesh = TrialMesh(weights)
    rows = mesh.repeat(mesh.put(weights), 8)
    assert mesh.count == 8
    for row, weight in zip(jax.tree.leaves(rows), jax.tree.leaves(weights), strict=True):
        assert row.shape == (8, *weight.shape)
        assert {shard.data.shape for shard in row.addressable_shards} == {(1, *weight.shape)}


def test_parameters_that_are_sharded_over_one_axis_try_along_the_other():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    weights = replicated(mesh)
    weights["0.weight"] = jax.device_put(weights["0.weight"], NamedSharding(mesh, PartitionSpec("model")))
    found = hdet.jax.find_lr(loss_fn, weights, tx_of(), batches(), total_steps=500)
    assert_same(found, hdet.jax.find_lr(loss_fn, params(), tx_of(), batches(), total_steps=500))


def test_fewer_trials_at_once_find_the_same():
    every, three = (
        hdet.jax.find_lr(loss_fn, params(), tx_of(), batches(), total_steps=200, trials_at_once=n)
        for n in (None, 3)
    )
    assert_same(three, every)


def test_the_caller_keeps_what_is_theirs():
    weights = jax.tree.map(jnp.array, params())
    hdet.jax.find_lr(loss_fn, weights, tx_of(), batches(), total_steps=50)
    for name, values in params().items():
        np.testing.assert_array_equal(weights[name], values)


def test_learning_rates_of_parts_are_scaled_together():
    # The optimizer may be part of a chain, and there may be several with their own learning rates.
    make = optax.inject_hyperparams(optax.adam)
    labels = {name: name[0] for name in params()}
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.multi_transform({"0": make(learning_rate=1e-4), "2": make(learning_rate=1e-3)}, labels),
    )
    found = hdet.jax.find_lr(loss_fn, params(), tx, batches(), total_steps=200)
    assert found.asked == pytest.approx([1e-4, 1e-3])
    assert found.lr[1] / found.lr[0] == pytest.approx(10)


def test_a_random_key_in_the_batch_and_a_score_without_it():
    def noisy(weights, batch):
        (x, y), key = batch
        return loss_fn(weights, (x + 0.1 * jax.random.normal(key, x.shape), y))

    data = [(batch, jax.random.key(i)) for i, batch in enumerate(batches())]
    found = hdet.jax.find_lr(
        noisy, params(), tx_of(), data, total_steps=200, score_fn=lambda w, batch: loss_fn(w, batch[0])
    )
    assert found.ramp[0][1] == pytest.approx(float(loss_fn(params(), batches()[0])))
    assert found.lr[0] > 1e-4


def test_float32_is_close_to_float64():
    with jax.enable_x64(False):
        single = hdet.jax.find_lr(loss_fn, params(), tx_of(), batches(), total_steps=200)
    double = hdet.jax.find_lr(loss_fn, params(), tx_of(), batches(), total_steps=200)
    assert single.lr == pytest.approx(double.lr, rel=0.05)


def test_where_there_is_nothing_to_see_the_learning_rate_stays(caplog):
    found = hdet.jax.find_lr(
        lambda w, b: 0 * loss_fn(w, b) + 1, params(), tx_of(), batches(), total_steps=100
    )
    assert found.lr == found.asked
    assert [record.levelname for record in caplog.records if record.name == "hdet.jax.find"] == ["WARNING"]
    assert "the loss is the same" in found.reason


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"total_steps": 20}, ValueError, "total_steps must be .* at least 50"),
        ({"trials_at_once": 0}, ValueError, "trials_at_once must be .* at least 1"),
        ({"loss_fn": None}, TypeError, r"loss_fn must be a function loss_fn\(params, batch\), got None"),
        ({"score_fn": 3}, TypeError, "score_fn must be a function"),
        ({"loss_fn": lambda w, b: (loss_fn(w, b), b)}, TypeError, "loss_fn must return the loss alone"),
        ({"loss_fn": lambda w, b: b[0]}, ValueError, "loss_fn must return one real number"),
        ({"batches": []}, ValueError, "batches must have at least one batch"),
        ({"batches": iter(batches(count=1))}, ValueError, "batches must .* be able to start over"),
        ({"tx": optax.adam}, TypeError, r"tx must be an optax.GradientTransformation, got .*inject_hyper"),
        ({"tx": optax.adam(1e-3)}, ValueError, r"tx must hold its learning_rate .*inject_hyperparams\("),
        ({"tx": tx_of(lr=0.0)}, ValueError, "learning_rate must be above 0, got 0"),
        ({"tx": tx_of(lr=-1.0)}, ValueError, r"learning_rate must be a number in \[0, 1e\+09\], got -1"),
        (
            {"tx": optax.inject_hyperparams(adamw)(learning_rate=lambda step: 1e-3)},
            ValueError,
            "tx must have a number as its learning_rate, got a schedule",
        ),
        (
            {"tx": optax.MultiSteps(tx_of(), 2).gradient_transformation()},
            ValueError,
            "tx must make a step of every batch, got optax.MultiSteps",
        ),
        (
            {"tx": hdet.jax.auto_lr(tx_of(), total_steps=100)},
            ValueError,
            "tx must be the optimizer alone, got hdet.jax.auto_lr",
        ),
        ({"loss_fn": lambda w, b: loss_fn(w, b) * jnp.nan}, hdet.NotFiniteError, "check the data"),
    ],
)
def test_bad_input_is_named(change, error, message):
    arguments = {
        "loss_fn": loss_fn,
        "params": params(),
        "tx": tx_of(),
        "batches": batches(),
        "total_steps": 100,
    }
    with pytest.raises(error, match=message):
        hdet.jax.find_lr(**arguments | change)


def test_inside_of_jit_it_says_so():
    with pytest.raises(TypeError, match="call find_lr outside of jit"):
        jax.jit(lambda w: hdet.jax.find_lr(loss_fn, w, tx_of(), batches(), total_steps=100).lr)(params())


def test_torch_is_not_imported():
    code = "import sys, hdet.jax; assert 'torch' not in sys.modules and 'jax' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)

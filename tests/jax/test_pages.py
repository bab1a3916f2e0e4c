"""What the page on JAX shows, and the example, run as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="jax is not installed; make test-jax runs them")
import jax
import jax.numpy as jnp
import numpy as np
import optax

import hdet.jax
from tests.jax.problem import batches, loss_fn, params

ROOT = Path(__file__).parents[2]


def train(weights, tx):
    state, data = tx.init(weights), batches()

    @jax.jit
    def step(weights, state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(weights, batch)
        updates, state = tx.update(gradients, state, weights, value=loss)
        return optax.apply_updates(weights, updates), state

    for i in range(1000):
        weights, state = step(weights, state, data[i % len(data)])
    return weights, state


def snippet_of(mark):
    pattern = rf"<!-- {mark} -->\n```python\n(.*?)```"
    (snippet,) = re.findall(pattern, (ROOT / "docs/jax.md").read_text(), re.DOTALL)
    return snippet


def test_the_snippet():
    start = jax.tree.map(jnp.array, params())
    names = {"loss_fn": loss_fn, "params": start, "batches": batches(), "train": train}
    exec(snippet_of("run with jax"), names)
    assert names["found"].lr[0] > 1e-3
    before, after = (loss_fn(weights, batches()[0]) for weights in (start, names["params"]))
    assert after < before


def test_the_snippet_of_weight_decay():
    noise = np.random.default_rng(0)
    data, held_out = (
        [(x, y + noise.normal(size=y.shape)) for x, y in batches(count=count, seed=seed)]
        for count, seed in ((4, 0), (8, 1))
    )
    start = jax.tree.map(jnp.array, params())
    names = {"loss_fn": loss_fn, "params": start, "batches": data, "held_out": held_out}
    exec(snippet_of("run with weight decay"), names)
    assert optax.tree.get(names["opt_state"], "weight_decay") > 0.1
    assert names["decay_state"].known.num_looks == 15
    weights, state = start, names["tx"].init(start)
    for step in range(1000):
        weights, state, _ = names["train_step"](weights, state, data[step % 4])
    weights = hdet.jax.eval_params(state, weights)
    found, fixed = (np.mean([loss_fn(w, batch) for batch in held_out]) for w in (names["params"], weights))
    assert found < 0.95 * fixed


def test_the_snippet_of_the_method():
    names = {}
    exec(snippet_of("run on eight devices"), names)
    record, opt_state = names["record"], names["opt_state"]
    assert record.step == 200 and record.num_replicas == 8
    assert len(record.controllers["comparing"].weights) == 8
    assert record.values["lr"] != sorted(record.values["lr"])  # a permutation of this round
    assert 0 < record.base["lr"] != 1e-2  # the controller has moved it
    assert opt_state.count.tolist() == [200] * 8
    # The best linear fit of sin(x1 + ... + x4) to normal x has the weights exp(-2).
    np.testing.assert_allclose(names["params"], np.exp(-2), atol=0.05)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name, steps, shown",
    [("jax_loop", "60", "found: learning rate"), ("jax_mesh", "100", "step 100: learning")],
)
def test_the_example(name, steps, shown, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    printed = subprocess.run(
        [sys.executable, str(ROOT / f"examples/{name}.py"), steps],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=290,
        check=True,
    ).stdout
    assert shown in printed
    assert float(printed.split("held-out loss ")[1]) < 4.5  # 5.5 is that of a model that knows nothing

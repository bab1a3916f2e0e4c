"""What the page on JAX shows, and the example, run as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
import jax
import jax.numpy as jnp
import optax

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


def test_the_snippet():
    (snippet,) = re.findall(
        r"<!-- run with jax -->\n```python\n(.*?)```", (ROOT / "docs/jax.md").read_text(), re.DOTALL
    )
    start = jax.tree.map(jnp.array, params())
    names = {"loss_fn": loss_fn, "params": start, "batches": batches(), "train": train}
    exec(snippet, names)
    assert names["found"].lr[0] > 1e-3
    before, after = (loss_fn(weights, batches()[0]) for weights in (start, names["params"]))
    assert after < before


@pytest.mark.timeout(300)
def test_the_example(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    shown = subprocess.run(
        [sys.executable, str(ROOT / "examples/jax_loop.py"), "60"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=290,
        check=True,
    ).stdout
    assert "found: learning rate" in shown
    assert float(shown.split("held-out loss ")[1]) < 4.5  # 5.5 is that of a model that knows nothing

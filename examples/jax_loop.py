"""Find the learning rate in a plain JAX loop, then train with it.

    pip install '.[jax]'
    python examples/jax_loop.py

The task and the model are those of one_device.py.
"""

import sys
import sysconfig
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax

import hdet.jax

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
FILES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def windows(files, num_batches, seed):
    """Batches of 64 random windows, and the character that follows each."""
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    starts = np.random.default_rng(seed).integers(len(text) - 16, size=(num_batches, 64, 1))
    return [(codes[:, :16], codes[:, 16]) for codes in text[starts + np.arange(17)].astype(np.int32)]


def loss_fn(params, batch):
    embedded = params["table"][batch[0]].reshape(-1, 256)
    logits = jax.nn.relu(embedded @ params["first"]) @ params["last"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


keys = jax.random.split(jax.random.key(0), 3)
shapes = {"table": (256, 16), "first": (256, 64), "last": (64, 256)}
params = {n: jax.random.normal(k, s) / s[0] ** 0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}
tx = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-4)  # any guess
batches = windows(FILES[20:], STEPS, seed=0)

found = hdet.jax.find_lr(loss_fn, params, tx, batches, total_steps=STEPS)
tx = hdet.jax.auto_lr(tx, total_steps=STEPS, found=found)


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, batch):
    updates, opt_state = tx.update(jax.grad(loss_fn)(params, batch), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


opt_state = tx.init(params)
for batch in batches:
    params, opt_state = train_step(params, opt_state, batch)
params = hdet.jax.eval_params(opt_state, params)  # the mean of the last weights
print(f"found: {found}")
print(f"held-out loss {np.mean([loss_fn(params, batch) for batch in windows(FILES[:20], 30, seed=1)]):.4f}")

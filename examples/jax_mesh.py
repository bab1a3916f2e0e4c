"""The paper's method in JAX: eight replicas with different learning rates, averaged every 20 steps.

    pip install '.[jax]'
    python examples/jax_mesh.py

It makes eight virtual devices of one CPU. The task and the model are those of jax_loop.py.
"""

import sys
import sysconfig
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hdet.jax
from hdet.method.controller import Controller, floor_matching

jax.config.update("jax_num_cpu_devices", 8)  # leave this out where you have eight devices

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
SYNC_EVERY = 20
WARM_UP = STEPS * 3 // 10
FILES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def windows(files, num_batches, seed):
    """Batches of 16 random windows for each replica, and the character that follows each."""
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    starts = np.random.default_rng(seed).integers(len(text) - 16, size=(num_batches, 8, 16, 1))
    return [(codes[..., :16], codes[..., 16]) for codes in text[starts + np.arange(17)].astype(np.int32)]


def loss_fn(params, batch):
    embedded = params["table"][batch[0]].reshape(-1, 256)
    logits = jax.nn.relu(embedded @ params["first"]) @ params["last"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


keys = jax.random.split(jax.random.key(0), 3)
shapes = {"table": (256, 16), "first": (256, 64), "last": (64, 256)}
params = {n: jax.random.normal(k, s) / s[0] ** 0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}

ensemble = hdet.jax.Ensemble(
    num_replicas=8,
    sync_every=SYNC_EVERY,
    spread=1 / 9,
    schedule=optax.cosine_onecycle_schedule(STEPS, peak_value=1.0, pct_start=0.3),  # times the learning rate
    controller=Controller(
        form="paper",
        start=WARM_UP,
        decay=floor_matching(start=1.0, floor=0.22, num_rounds=(STEPS - WARM_UP) / SYNC_EVERY),
    ),
)
tx = ensemble.wrap(optax.inject_hyperparams(optax.adamw)(learning_rate=3e-3))


def train_step(params, opt_state, batch):
    """Make a step of one replica."""
    loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
    gradients = jax.lax.pmean(gradients, "replica")  # all replicas share it
    updates, opt_state = tx.update(gradients, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


mesh = Mesh(np.array(jax.devices()), ("replica",))
row = PartitionSpec("replica")  # arrays have a row for each replica


def on_mesh(function):
    return jax.jit(jax.shard_map(jax.vmap(function), mesh=mesh, in_specs=row, out_specs=row))


train_step, converge = on_mesh(train_step), on_mesh(ensemble.converge)
params, opt_state = ensemble.repeat((params, tx.init(params)), mesh)
for step, batch in enumerate(windows(FILES[20:], STEPS, seed=0), start=1):
    batch = jax.device_put(batch, NamedSharding(mesh, row))
    params, opt_state = train_step(params, opt_state, batch)
    if step % SYNC_EVERY == 0:
        params, opt_state = converge(params, opt_state)
        opt_state, record = ensemble.steer(opt_state)
        if step % (5 * SYNC_EVERY) == 0:
            low, high = min(record.values["lr"]), max(record.values["lr"])
            print(f"step {step}: learning rates {low:.5f} to {high:.5f}, loss {np.mean(record.losses):.4f}")
params, opt_state = converge(params, opt_state)

params = jax.tree.map(lambda rows: np.asarray(rows[0]), params)  # all rows are equal now
held_out = [loss_fn(params, jax.tree.map(np.concatenate, b)) for b in windows(FILES[:20], 30, seed=1)]
print(f"held-out loss {np.mean(held_out):.4f}")

"""The paper's method in JAX: eight replicas with different learning rates, averaged every 20 steps."""

import sys
import sysconfig
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

import hdet.jax
from hdet.method.controller import Controller

jax.config.update("jax_num_cpu_devices", 8)  # leave this out where you have eight devices
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
FILES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
ROW = PartitionSpec("replica")  # arrays have a row for each replica


def windows(files, num_batches, seed):
    """Batches of 16 random windows for each replica, and the character that follows each."""
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    starts = np.random.default_rng(seed).integers(len(text) - 16, size=(num_batches, 8, 16, 1))
    return [(codes[..., :16], codes[..., 16]) for codes in text[starts + np.arange(17)].astype(np.int32)]


def loss_fn(params, batch):
    embedded = params["table"][batch[0]].reshape(-1, 256)
    logits = jax.nn.relu(embedded @ params["first"]) @ params["last"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


def train_step(params, opt_state, batch):
    loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
    gradients = jax.lax.pmean(gradients, "replica")  # all replicas share it
    updates, opt_state = tx.update(gradients, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


shapes = {"table": (256, 16), "first": (256, 64), "last": (64, 256)}
params = {n: jax.random.normal(jax.random.key(i), shapes[n]) / 16 for i, n in enumerate(shapes)}
plan = optax.cosine_onecycle_schedule(STEPS, peak_value=1.0, pct_start=0.3)  # times the learning rate
paper = Controller(form="paper", start=STEPS * 3 // 10, end=0.22)  # of the learning rate at the start
settings = {"num_replicas": 8, "sync_every": 20, "total_steps": STEPS, "schedule": plan}
ensemble = hdet.jax.Ensemble(spread=1 / 9, controllers=[paper], **settings)
tx = ensemble.wrap(optax.inject_hyperparams(optax.adamw)(learning_rate=3e-3))
mapped = {"mesh": Mesh(np.array(jax.devices()), ("replica",)), "in_specs": ROW, "out_specs": ROW}
params, opt_state = ensemble.repeat((params, tx.init(params)), mapped["mesh"])
train_step = jax.jit(jax.shard_map(jax.vmap(train_step), **mapped))
converge = jax.jit(jax.shard_map(jax.vmap(ensemble.converge), **mapped))
for step, batch in enumerate(windows(FILES[20:], STEPS, seed=0), start=1):
    params, opt_state = train_step(params, opt_state, batch)
    if step % 20 == 0:
        params, opt_state = converge(params, opt_state)
        opt_state, record = ensemble.steer(opt_state)  # the only wait for the devices
        print(f"step {step}: learning rates {min(record.values['lr']):.5f} to {max(record.values['lr']):.5f}")
params = jax.tree.map(lambda rows: np.asarray(rows[0]), converge(params, opt_state)[0])  # rows are equal
held_out = [loss_fn(params, jax.tree.map(np.concatenate, b)) for b in windows(FILES[:20], 30, seed=1)]
print(f"held-out loss {np.mean(held_out):.4f}")

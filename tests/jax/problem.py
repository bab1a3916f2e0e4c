"""One small problem twice: for torch and for JAX, with the same data and the same initial weights."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


def torch_net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def params():
    return {name: tensor.numpy().copy() for name, tensor in torch_net().state_dict().items()}


def batches(size=32, count=50, seed=0):
    generator = np.random.default_rng(seed)
    inputs = generator.normal(size=(count, size, 8))
    return [(x, np.sin(x.sum(axis=1, keepdims=True))) for x in inputs]


def for_torch(data):
    return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data]


def torch_loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def loss_fn(params, batch):
    import jax.numpy as jnp

    hidden = jnp.tanh(batch[0] @ params["0.weight"].T + params["0.bias"])
    return jnp.mean((hidden @ params["2.weight"].T + params["2.bias"] - batch[1]) ** 2)

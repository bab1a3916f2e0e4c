"""Virtual replicas equal real gloo ranks with the same seeds and batches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from tests.helpers.models import batch
from tests.helpers.replicas import run_replicas

STEPS = 50


def make_model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model.double()  # in single precision Adam turns rounding of tiny gradients into whole steps


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.05, weight_decay=0.01)
    if name == "momentum":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)
    if name == "nesterov":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    if name == "adam":
        return torch.optim.Adam(groups, lr=0.01, weight_decay=0.01)
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def loss_of(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = data
    return (model(x) - y).square().mean()


def batch_of(replica: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(replica, step)


def explored(name: str) -> list[Any]:
    return [
        hdet.LearningRate(0.3),
        *([hdet.WeightDecay(0.5)] if name != "nesterov" else []),
        *([hdet.Momentum(0.3)] if name in ("momentum", "adam") else []),
    ]


def settings(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "scheduler": OneCycleLR(optimizer, 0.05, total_steps=STEPS, cycle_momentum=False),
        "explore": explored(name),
        "sync_every": 7,
        "controllers": [hdet.Controller(form="log", start=10)],
        "assignment": "latin",
        "records": hdet.Records(),
        "seed": 3,
        "average_tail": 0.3 if name in ("momentum", "adamw") else 0.0,
    }


def run_real(rank: int, name: str) -> dict[str, Any]:
    model = make_model()
    warnings.simplefilter("ignore", FutureWarning)  # the argument gets another name in torch 2.13
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = make_optimizer(name, model)
    chosen = settings(name, optimizer)
    ensemble = hdet.Ensemble(optimizer, model=model, **chosen)
    for t in range(STEPS):
        loss = loss_of(ddp, batch_of(rank, t))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ensemble.step(loss)
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "records": list(chosen["records"]),
    }


def run_virtual(name: str, num_replicas: int, **more: Any) -> tuple[nn.Module, list[hdet.RoundRecord], Any]:
    model = make_model()
    optimizer = make_optimizer(name, model)
    chosen = settings(name, optimizer) | more
    ensemble = hdet.VirtualEnsemble(model, optimizer, loss_of, num_replicas=num_replicas, **chosen)
    for t in range(STEPS):
        ensemble.step(batches=[batch_of(r, t) for r in range(num_replicas)])
    return model, list(chosen["records"]), ensemble


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adam", "adamw"])
@pytest.mark.parametrize("vectorize", [True, False])
def test_virtual_replicas_equal_real_ranks(name: str, vectorize: bool) -> None:
    (real, *_) = run_replicas(run_real, 4, name)
    model, records, _ = run_virtual(name, 4, vectorize=vectorize)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, real["state"][key], rtol=1e-7, atol=1e-9)
    assert len(records) == len(real["records"]) == 8
    for ours, theirs in zip(records, real["records"], strict=True):
        assert (ours.step, ours.positions) == (theirs.step, theirs.positions)
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-7)
        assert list(ours.base.values()) == pytest.approx(list(theirs.base.values()), rel=1e-7)
        for tunable, values in theirs.values.items():
            assert ours.values[tunable] == pytest.approx(values, rel=1e-7)


def test_local_gradients_let_replicas_part_and_averaging_joins_them() -> None:
    _, _, ensemble = run_virtual("adamw", 4, gradients="local", vectorize=True)
    matrix = ensemble.replicas.rows.matrices[0]
    assert torch.equal(matrix[0], matrix[3])  # the last step is a sync
    with pytest.warns(hdet.HdetWarning, match="after total_steps"):
        ensemble.step(batches=[batch_of(r, 99) for r in range(4)])
    # One more step with local gradients: replicas differ by more than their multipliers say.
    difference = matrix - matrix.mean(dim=0)
    directions = difference / difference.norm(dim=1, keepdim=True)
    assert (directions @ directions.t()).abs().min() < 0.9
    moments = ensemble.replicas.row_optimizer.moments[0]["exp_avg"]
    assert not torch.equal(moments[0], moments[1])

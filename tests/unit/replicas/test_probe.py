"""hdet.Probe: what it takes, and one look at it when a run is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import hdet
from tests.helpers.errors import error_of
from tests.helpers.models import linear, loss_of
from tests.helpers.replicas import run_replicas

X, Y = torch.randn(200, 3), torch.randn(200, 1)


def looking_at(optimizer: torch.optim.Optimizer, model: nn.Module, probe: Any, **told: Any) -> hdet.AutoLR:
    settings = {
        "total_steps": 100,
        "model": model,
        "controllers": [hdet.HeldOutWeightDecay()],
        "probe": probe,
    }
    return hdet.AutoLR(optimizer, **settings | told)


def test_what_is_no_probe_is_shown_by_its_type_and_shape():
    model, optimizer = linear(0.01)

    def auto_of(**told: Any) -> hdet.AutoLR:
        return hdet.AutoLR(optimizer, **{"total_steps": 100, "model": model} | told)

    write = r": write hdet.Probe([(x, y)], loss)"
    assert error_of(auto_of, probe=X).endswith(f"type Tensor and shape (200, 3){write}")
    assert error_of(hdet.Probe, X, loss_of).endswith(f"type Tensor and shape (200, 3){write}")
    assert error_of(hdet.Probe, {"x": X}, loss_of).endswith(write)
    assert error_of(hdet.Probe, loss_of, [(X, Y)]).endswith(write)
    assert error_of(hdet.Probe, [(X, Y)], X).endswith(write)
    assert error_of(auto_of, model=optimizer) == (
        "model must be a torch.nn.Module or None, got a value of type AdamW: "
        "pass the model that the optimizer trains"
    )
    assert "got a value of type list and length 2" in error_of(lambda: hdet.AutoLR([X, X], total_steps=9))


def test_a_data_set_is_to_be_wrapped_and_an_iterator_may_be_used_up():
    model, optimizer = linear(0.01)
    data = TensorDataset(X, Y)
    wrap = "wrap it in a DataLoader"
    assert error_of(hdet.Probe, data, loss_of).endswith(wrap)
    assert error_of(hdet.find_lr, model, optimizer, data, loss_of, total_steps=100).endswith(wrap)
    used = iter([(X, Y)])
    next(used)
    assert "not iter(loader) or a generator" in error_of(hdet.Probe, used, loss_of)


def test_rows_that_are_taken_for_batches_are_explained():
    model, optimizer = linear(0.01)
    probe = hdet.Probe((X, Y), lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
    with pytest.raises(RuntimeError, match=r"a list of batches, write hdet\.Probe\(\[\(x, y\)\], loss\)"):
        looking_at(optimizer, model, probe)


def test_a_probe_is_scored_once_when_a_run_is_built():
    model, optimizer = linear(0.01)
    text = error_of(looking_at, optimizer, model, hdet.Probe((X, Y), loss_of))
    assert "failed on the first batch, a value of type Tensor and shape (50, 3) (ValueError: too many" in text
    assert text.endswith(": batches must be a list of batches, write hdet.Probe([(x, y)], loss)")
    text = error_of(looking_at, optimizer, model, hdet.Probe([(X, Y)], nn.CrossEntropyLoss()))
    assert text.endswith("write def loss(model, batch): return cross_entropy(model(batch[0]), batch[1])")
    assert optimizer.param_groups[0]["lr"] == 0.01
    looking_at(optimizer, model, hdet.Probe([(X, Y)], loss_of)).close()  # nothing is claimed by what failed
    with pytest.raises(TypeError, match="but it failed on the first batch"):
        hdet.VirtualEnsemble(
            model,
            optimizer,
            loss_of,
            num_replicas=2,
            total_steps=100,
            sync_every=5,
            controllers=[hdet.HeldOutWeightDecay()],
            probe=hdet.Probe([(X, Y)], nn.CrossEntropyLoss()),
        )


class Counting(nn.Module):
    """Counts its calls, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        assert not self.training and not torch.is_grad_enabled()
        return self.layers(x + torch.randn_like(x))


def test_scoring_a_probe_once_leaves_everything_as_it_was():
    model = Counting()
    model.layers[2].eval()
    modes = [module.training for module in model.modules()]
    calls = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(len(batch[0]))
        return loss_of(model, batch)

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    looking_at(torch.optim.AdamW(model.parameters(), lr=0.01), model, hdet.Probe([(X, Y)], loss))
    assert calls == [25]  # of 200 in 8 parts
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes


def test_a_probe_draws_the_same_random_numbers_in_every_score():
    probe = hdet.Probe([(X, Y)], loss_of)
    model = Counting().eval()
    with torch.no_grad():
        first, mean = probe(model), probe.mean(model)
        torch.rand(3)
        assert torch.equal(probe(model), first) and torch.equal(probe.mean(model), mean)
    assert len(set(first.tolist())) == 8


def _with_a_bad_probe(rank: int, is_sharded: bool) -> str:
    model, _ = linear(0.01)
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    wrapped = model if is_sharded else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    is_bad = is_sharded or rank == 1
    probe = hdet.Probe([(X, Y)], nn.CrossEntropyLoss() if is_bad else loss_of)
    text = error_of(looking_at, optimizer, wrapped, probe)
    looking_at(optimizer, wrapped, hdet.Probe([(X, Y)], loss_of)).close()
    return text


@pytest.mark.parametrize("is_sharded", [False, True])
def test_all_ranks_raise_together_where_a_probe_cannot_be_scored(is_sharded: bool):
    first, second = run_replicas(_with_a_bad_probe, 2, is_sharded)
    assert second.startswith("loss must be a function loss(model, batch)")
    assert first == (second if is_sharded else f"replica 1 could not be built: TypeError: {second}")

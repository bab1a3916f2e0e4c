"""Odd calls, each with the answer or the error that helps."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
from torch import nn

import hdet


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - x.sum(1, keepdim=True)).square().mean()


def trained(model: nn.Module | None = None, lr: float = 1e-4):
    model = model or nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def data(size: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, 3) for _ in range(20)]


def test_the_search_sees_its_steps_within_an_autocast_of_the_caller():
    model, optimizer = trained()
    with torch.autocast("cpu", torch.bfloat16):
        found = hdet.find_lr(model, optimizer, data(), loss_of, total_steps=300)
        assert torch.is_autocast_cache_enabled()
    assert found.lr[0] > 1e-3


@pytest.mark.parametrize("read", ["find_lr", "probe"])
@pytest.mark.parametrize("kind", ["loader", "sampler"])
def test_the_generator_of_a_loader_is_put_back(read, kind):
    generator = torch.Generator().manual_seed(0)
    examples = torch.randn(64, 3)
    if kind == "loader":
        loader = torch.utils.data.DataLoader(examples, 8, shuffle=True, generator=generator)
    else:
        sampler = torch.utils.data.RandomSampler(examples, generator=generator)
        batched = torch.utils.data.BatchSampler(sampler, 8, drop_last=True)
        loader = torch.utils.data.DataLoader(examples, batch_sampler=batched)
    before = generator.get_state()
    if read == "find_lr":
        hdet.find_lr(*trained(), loader, loss_of, total_steps=60)
    else:
        hdet.Probe(loader, loss_of)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("door", ["find_lr", "AutoLR", "OneCycleAutoLR", "VirtualEnsemble", "warm_start"])
def test_a_lazy_module_is_refused(door):
    model, optimizer = trained(nn.LazyLinear(1))
    calls = {
        "find_lr": lambda: hdet.find_lr(model, optimizer, data(), loss_of, total_steps=100),
        "AutoLR": lambda: hdet.AutoLR(optimizer, total_steps=100),
        "OneCycleAutoLR": lambda: hdet.OneCycleAutoLR(optimizer, max_lr=0.1, total_steps=100),
        "VirtualEnsemble": lambda: hdet.VirtualEnsemble(model, optimizer, loss_of),
        "warm_start": lambda: hdet.warm_start(model),
    }
    with pytest.raises(ValueError, match="model must have its parameters, got 2 of lazy modules"):
        calls[door]()


def test_a_search_from_a_huge_learning_rate_is_refused():
    with pytest.raises(ValueError, match=r"optimizer's lr must be a number in \[0, 1e\+09\], got 1e\+300"):
        hdet.find_lr(*trained(lr=1e300), data(), loss_of, total_steps=100)


def test_one_example_with_batch_norm_is_a_fault_of_the_batches():
    model, optimizer = trained(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    with pytest.raises(ValueError, match="batches must hold 2 examples or more for BatchNorm, got 1"):
        hdet.find_lr(model, optimizer, data(1), loss_of, total_steps=100)


def test_a_probe_without_examples_is_named():
    with pytest.raises(ValueError, match="probe batches must hold at least one example"):
        hdet.find_lr(*trained(), data(), loss_of, total_steps=100, probe=[])


def test_the_spread_of_auto_lr_has_no_remedy_that_it_does_not_take():
    model, optimizer = trained()
    with pytest.raises(ValueError, match=r"^spread must be a number in \[0, 1\), got 1.5$"):
        hdet.AutoLR(optimizer, total_steps=100, model=model, spread=1.5)


@pytest.mark.parametrize("priors", [3, "abc", [0.5], [(1.0, 0.0)], torch.zeros(0)])
def test_priors_are_rows_of_three(priors):
    with pytest.raises(TypeError, match=r"priors must be a list of \(weight, mean, deviation\), or None"):
        hdet.Thermostat(priors=priors)


def test_what_is_driven_is_not_pickled():
    model, optimizer = trained()
    with pytest.raises(TypeError, match=r"must not be pickled: save its state_dict\(\)"):
        pickle.dumps(hdet.AutoLR(optimizer, total_steps=100, model=model))
    pickle.dumps((model, optimizer))


@pytest.mark.parametrize("kind", ["function", "generator", "lock", "random", "class"])
def test_a_part_that_cannot_be_saved_is_named(tmp_path, kind):
    part = {
        "function": lambda: 0,
        "generator": (x for x in ()),
        "lock": threading.Lock(),
        "random": torch.Generator(),
        "class": nn.Linear,
    }[kind]
    with pytest.raises(TypeError, match=r"^thing must hold tensors, numbers, texts, and lists and"):
        hdet.save_checkpoint(tmp_path, step=1, thing=part, other=1.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("last_epoch", [0, 5])
def test_a_schedule_goes_on_only_where_one_was(last_epoch):
    must = "last_epoch must be -1 for an optimizer that no such schedule has driven"
    with pytest.raises(ValueError, match=must):
        hdet.OneCycleAutoLR(trained()[1], max_lr=0.1, total_steps=10, last_epoch=last_epoch)
    with pytest.raises(ValueError, match=must):
        hdet.ReplayLR(trained()[1], {"lr": [0.1] * 9}, last_epoch=last_epoch)


@pytest.mark.parametrize("controllers", [[], [hdet.Thermostat()]], ids=["alone", "thermostat"])
@pytest.mark.parametrize("at", [10, 395])
def test_a_parameter_that_is_thawed_and_not_held_by_the_optimizer_is_named(controllers, at):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.01)
    probe = hdet.Probe(data(), loss_of) if controllers else None
    auto = hdet.AutoLR(optimizer, total_steps=400, model=model, controllers=controllers, probe=probe)
    with pytest.raises(
        hdet.HdetError, match="4 parameters are trained now, but 2 were when the ensemble was"
    ):
        for step in range(400):
            model[0].requires_grad_(step >= at)
            loss = loss_of(model, data()[0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            auto.step(loss)


@pytest.mark.parametrize("count", [10**9, 10**30])
def test_counts_that_no_machine_can_hold_are_refused(count):
    model, optimizer = trained()
    with pytest.raises(ValueError, match="num_replicas must be at most 65536, got"):
        hdet.VirtualEnsemble(model, optimizer, loss_of, num_replicas=count)
    with pytest.raises(ValueError, match="world_size must be at most 65536, got"):
        hdet.OneCycleAutoLR(optimizer, max_lr=0.1, total_steps=10, world_size=count)

"""When the last reference is dropped, everything is free at once, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.helpers.replicas import run_replicas


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def train(model: nn.Module, optimizer: Any, scheduler: Any, num_steps: int = 6) -> Any:
    for _ in range(num_steps):
        loss = loss_of(model, torch.ones(4, 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
    return scheduler


def ensemble(model, optimizer):
    explored = [hdet.LearningRate(0.1), hdet.Momentum(spread=0.1)]
    made = hdet.Ensemble(optimizer, model=model, explore=explored, sync_every=2, records=hdet.Records())
    return train(model, optimizer, made)


def closed(model, optimizer):
    with ensemble(model, optimizer) as made:
        return made


def auto_lr(model, optimizer):
    return train(model, optimizer, hdet.AutoLR(optimizer, total_steps=20, model=model, sync_every=3))


def thermostat(model, optimizer):
    told = {"controllers": [hdet.Thermostat()], "probe": hdet.Probe([torch.randn(200, 3)], loss_of)}
    auto = hdet.AutoLR(optimizer, total_steps=200, model=model, **told)
    return train(model, optimizer, auto, 48)


def one_cycle(model, optimizer):
    made = hdet.OneCycleAutoLR(
        optimizer, max_lr=0.1, total_steps=20, ensemble_lr_spread_ratio=0.1, model_sync_interval=2
    )
    return train(model, optimizer, made)


def virtual(model, optimizer):
    made = hdet.VirtualEnsemble(model, optimizer, loss_of, num_replicas=3, sync_every=2)
    for _ in range(5):
        made.step(torch.ones(4, 3))
    return made


def replay(model, optimizer):
    return hdet.ReplayLR(optimizer, {"lr": [0.1, 0.2]})


def search(model, optimizer):
    return hdet.find_lr(model, optimizer, [torch.randn(16, 3)] * 9, loss_of, total_steps=100)


def refused(model, optimizer):
    with pytest.raises(ValueError, match="sync_every"):
        hdet.Ensemble(optimizer, model=model, sync_every=0)


def failed_step(model, optimizer):
    made = auto_lr(model, optimizer)
    with pytest.raises(TypeError, match="loss must be"):
        made.step("0.5")
    return made


def failed_sync(model, optimizer):
    made = hdet.Ensemble(optimizer, model=model, sync_every=2)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    with pytest.raises(hdet.AllReplicasFailedError):
        train(model, optimizer, made)
    return made


def failed_search(model, optimizer):
    with pytest.raises(RuntimeError):
        hdet.find_lr(model, optimizer, [torch.randn(16, 7)] * 9, loss_of, total_steps=100)


MAKERS = [
    ensemble,
    closed,
    auto_lr,
    thermostat,
    one_cycle,
    virtual,
    replay,
    search,
    refused,
    failed_step,
    failed_sync,
    failed_search,
]


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def left_alive(make: Callable[..., Any]) -> list[str]:
    make(*build())  # imports and caches of torch
    with without_collector():
        model, optimizer = build()
        made = make(model, optimizer)
        known = {"model": weakref.ref(model), "optimizer": weakref.ref(optimizer)}
        if made is not None:
            known["made"] = weakref.ref(made)
        del model, optimizer, made
        return [name for name, ref in known.items() if ref() is not None]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_nothing_outlives_its_last_reference(make):
    assert left_alive(make) == []


def test_an_ensemble_out_of_scope_does_not_claim_its_optimizer():
    model, optimizer = build()
    ensemble(model, optimizer)
    train(model, optimizer, hdet.Ensemble(optimizer, model=model, sync_every=2))


def test_hooks_of_an_ensemble_out_of_scope_do_nothing():
    model, optimizer = build()
    ensemble(model, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.load_state_dict(optimizer.state_dict())
    loss_of(model, torch.ones(4, 3)).backward()
    for _ in range(9):  # nobody counts them any more
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == rate


def _ranks_left_alive(rank: int, make: str) -> list[str]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def build_on_rank() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(3, 1), process_group=dist.new_group([0, 1]))
        return ddp, torch.optim.AdamW(ddp.parameters(), lr=0.1)

    def run(model, optimizer) -> Any:
        group = model.process_group
        if make == "auto_lr":
            scheduler = hdet.AutoLR(optimizer, total_steps=20, model=model, sync_every=3, replicas=group)
        elif make == "one_cycle":
            scheduler = hdet.OneCycleAutoLR(
                optimizer,
                max_lr=0.1,
                total_steps=20,
                ensemble_lr_spread_ratio=0.1,
                model_sync_interval=2,
                replicas=group,
                model=model,
            )
        elif make == "local":
            scheduler = hdet.Ensemble(
                optimizer, model=model, sync_every=2, gradients="local", total_steps=20, replicas=group
            )
        else:  # one rank is built with other settings: all raise
            with pytest.raises(hdet.ConfigurationMismatchError):
                hdet.Ensemble(optimizer, model=model, sync_every=2 + rank, replicas=group)
            return None
        return train(model, optimizer, scheduler)

    run(*build_on_rank())
    with without_collector():
        model, optimizer = build_on_rank()
        made = run(model, optimizer)
        known = {"model": weakref.ref(model), "optimizer": weakref.ref(optimizer)}
        group = model.process_group
        known["group"] = weakref.ref(group)
        del model, optimizer, made  # before the group: DistributedDataParallel must not outlive it
        dist.destroy_process_group(group)
        del group
        return [name for name, ref in known.items() if ref() is not None]


@pytest.mark.parametrize("make", ["auto_lr", "one_cycle", "local", "refused"])
def test_a_process_group_ends_with_what_used_it(make):
    assert run_replicas(_ranks_left_alive, 2, make) == [[], []]

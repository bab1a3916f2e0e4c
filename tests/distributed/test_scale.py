"""What hdet takes and sends is what ``hdet plan`` says, on a few real ranks and on many pretended ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import hdet
from benchmarks.memory import measure
from benchmarks.memory_meter import MemoryMeter
from hdet.lab.plan import memory_cost, plan

BUCKET = 25 * 2**20


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_planned_memory_is_what_is_measured(num_ranks: int) -> None:
    row = measure(1_000_000, num_ranks, optimizer="sgd")
    size = row["parameter_bytes"]
    cost = memory_cost(size // 4, num_ranks)
    assert row["peak_bytes"] == pytest.approx(cost.peak, rel=0.1)
    assert row["peak_while_saving_bytes"] == pytest.approx(cost.peak_while_saving, rel=0.1)
    assert row["peak_bytes"] <= 1.15 * 4 * size / num_ranks + BUCKET
    parts = row["peak_of"]
    assert parts["tail"] == pytest.approx(cost.tail / size, abs=0.02)
    assert parts["guard"] == pytest.approx(cost.guard / size, abs=0.02)
    assert parts["search"] == pytest.approx(cost.search / size, abs=0.02)


@contextlib.contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """One process that believes in many; nothing is sent, and all answer what this one says."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes that each all-gather brings."""
    brought: list[int] = []
    real = dist.all_gather

    def all_gather(out: list[torch.Tensor], mine: torch.Tensor, *args: object, **settings: object) -> object:
        brought.append((len(out) - 1) * mine.nbytes)
        return real(out, mine, *args, **settings)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(dist, "all_gather", all_gather)
    yield brought
    monkeypatch.setattr(dist, "all_gather", real)


@pytest.mark.parametrize(("num_replicas", "num_shards"), [(256, 1), (128, 8)])
def test_a_sync_of_many_ranks(num_replicas: int, num_shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(num_replicas * num_shards), MemoryMeter() as meter:
        model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))
        axis = None
        if num_shards > 1:
            mesh = init_device_mesh("cpu", (num_replicas, num_shards), mesh_dim_names=("replicate", "shard"))
            fully_shard(model, mesh=mesh)
            axis = mesh["replicate"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        auto = hdet.AutoLR(optimizer, total_steps=100, sync_every=2, model=model, replicas=axis)
        assert auto.replicas.count == num_replicas
        count = sum(p.numel() for p in model.parameters())
        for step in range(2):
            loss = model(torch.ones(2, 256)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with counted(monkeypatch) as brought:
                auto.step(loss)
            if step == 0:
                assert brought == []
        sync = plan(count // num_shards, num_replicas, 1.0, 1e9, 2, averages=False, num_shards=num_shards)
        assert len(brought) == sync.num_collectives_per_sync
        assert sum(brought) == sync.bytes_per_sync
        auto.converge()  # gathers what replicas hold in parts
        assert set(auto.state_dict()) >= {"tail", "controllers"}
        cost = memory_cost(count, num_replicas, num_shards=num_shards)
        assert meter.peak_of["tail"] == pytest.approx(cost.tail, rel=0.1, abs=4096)
        assert meter.peak_of["guard"] <= cost.guard

"""Replicas made of pipeline stages: every rank holds other parameters. 2 stages in 2 replicas."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import hdet
from tests.distributed.test_sharded import batch_of, loss_of
from tests.helpers.replicas import run_replicas

STEPS, RANKS = 60, 4


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def joined(step):
    return tuple(torch.cat(pair) for pair in zip(batch_of(0, step), batch_of(1, step), strict=True))


def settings(optimizer, spread):
    """Of AutoLR, or of an ensemble whose replicas differ and are compared."""
    if spread:
        return {
            "explore": [hdet.LearningRate(spread)],
            "controllers": [hdet.Controller()],
            "sync_every": 10,
            "total_steps": STEPS,
            "average_tail": 0.2,
        }
    return {"total_steps": STEPS, "sync_every": 5}


def _stage(rank, spread, spoil=None):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "stage"))
    replica, index = mesh.get_coordinate()
    module = (build()[:2], build()[2:])[index]
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh["stage"].get_group())

    def mean_of(prediction, target):
        return (prediction - target).square().mean()

    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=mean_of)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    records = hdet.Records()
    kind = hdet.Ensemble if spread else hdet.AutoLR
    auto = kind(
        optimizer, model=module, replicas=mesh["replicate"], records=records, **settings(optimizer, spread)
    )
    for step in range(STEPS):
        x, y = batch_of(replica, step)
        losses = []
        optimizer.zero_grad()
        if index == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        for p in module.parameters():
            dist.all_reduce(p.grad, group=mesh["replicate"].get_group())
            p.grad /= 2
        optimizer.step()
        if spoil == (step, replica, index):
            with torch.no_grad():
                module[0].weight.mul_(1.5)
        for loss in losses:  # the last stage has them, and speaks for its replica
            auto.observe(loss)
        auto.step()
    means = [r.losses for r in records]
    return replica, [p.detach() for p in module.parameters()], means, auto.base["lr"]


def test_a_run_in_stages_is_that_of_one_process():
    ranks = run_replicas(_stage, RANKS, 0.0)
    model, records = build(), hdet.Records()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    auto = hdet.AutoLR(optimizer, model=model, records=records, **settings(optimizer, 0.0))
    for step in range(STEPS):
        loss = loss_of(model, joined(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)
    expected = list(model.parameters())
    for rank, (_, mine, means, base) in enumerate(ranks):
        theirs = expected[:2] if rank % 2 == 0 else expected[2:]
        torch.testing.assert_close(mine, [p.detach() for p in theirs], rtol=1e-9, atol=1e-12)
        assert base == auto.base["lr"]
        if rank == 0:  # the first stage of the first replica writes the records
            assert [sum(row) / 2 for row in means] == pytest.approx([r.losses[0] for r in records], rel=1e-9)
        else:
            assert not means


def test_replicas_in_stages_that_differ_are_compared_averaged_and_steered_as_virtual_ones():
    ranks = run_replicas(_stage, RANKS, 0.3)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ensemble = hdet.VirtualEnsemble(model, optimizer, loss_of, num_replicas=2, **settings(optimizer, 0.3))
    for step in range(STEPS):
        ensemble.step(batches=[batch_of(0, step), batch_of(1, step)])
    expected = [p.detach() for p in model.parameters()]
    for rank, (_, mine, _, base) in enumerate(ranks):
        assert base == pytest.approx(ensemble.engine.base["lr"], rel=1e-9)
        torch.testing.assert_close(
            mine, expected[:2] if rank % 2 == 0 else expected[2:], rtol=1e-7, atol=1e-9
        )


def _spoilt(rank):
    try:
        _stage(rank, 0.0, (12, 1, 1))
    except hdet.ReplicasDifferError as error:
        return str(error)
    return ""


def test_a_stage_that_differs_stops_all_ranks():
    """Two replicas cannot tell which of them is right. The stages that are equal learn of it too."""
    messages = run_replicas(_spoilt, RANKS)
    assert all("must hold the same parameters" in message for message in messages)
    assert "'2.weight' by" in messages[1] and "another part of the replica" in messages[0]

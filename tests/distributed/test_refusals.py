"""What would train nonsense in silence is refused, and so it would be nonsense."""

from __future__ import annotations

import warnings

import pytest
import schedulefree
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.replicas.refusals import OPTIMIZERS
from tests.helpers.models import Net
from tests.helpers.ranks import message_of, of_both, train
from tests.helpers.replicas import run_replicas


def _refused(rank, what):
    net = Net().float()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    settings = {"model": model}
    if what == "fsdp1":
        sharded = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        optimizer, settings = torch.optim.SGD(sharded.parameters(), lr=0.1), {"model": sharded}
    elif what == "zero":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing it uses what torch itself deprecates
            from torch.distributed.optim import ZeroRedundancyOptimizer
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    elif what == "lbfgs":
        optimizer = torch.optim.LBFGS(net.parameters(), lr=1.0)
    elif what == "asgd":
        optimizer = torch.optim.ASGD(net.parameters(), lr=0.1)
    elif what == "schedule-free":
        optimizer = schedulefree.AdamWScheduleFree(net.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = message_of((TypeError, ValueError), lambda: hdet.Ensemble(optimizer, **settings))
        if what == "fsdp1":

            def search():
                hdet.find_lr(settings["model"], optimizer, [], lambda m, b: m(b), total_steps=100)

            assert message_of(TypeError, search) == told
        return told


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("fsdp1", "got a FullyShardedDataParallel: each rank holds"),
        ("zero", "got a ZeroRedundancyOptimizer: each rank"),
        ("lbfgs", "got LBFGS: replicas would evaluate"),
        ("asgd", "got ASGD: its averages and their weights follow each replica's learning rate"),
        ("schedule-free", "got AdamWScheduleFree: its averages"),
    ],
)
def test_what_would_be_nonsense_is_refused(what, words):
    for message in run_replicas(_refused, 2, what):
        assert words in message, message


def _averages_of_its_own(rank, kind, spread):
    """After a sync: how far the optimizers of two ranks are apart, in their states and in their groups."""
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = {"asgd": torch.optim.ASGD, "schedule-free": schedulefree.SGDScheduleFree}[kind](
        net.parameters(), lr=0.1
    )
    if kind == "schedule-free":
        optimizer.train()
    ensemble = hdet.Ensemble(
        optimizer, model=model, explore=[hdet.LearningRate(spread)], sync_every=5, moments="average"
    )
    train(ensemble, model, optimizer, rank, range(10))
    kept = [
        v.double().reshape(-1)
        for p in net.parameters()
        for _, v in sorted(optimizer.state[p].items())
        if isinstance(v, torch.Tensor)
    ]
    numbers = [
        float(v) for k, v in sorted(optimizer.param_groups[0].items()) if k != "lr" and isinstance(v, float)
    ]
    return torch.equal(*of_both(torch.cat([*kept, torch.tensor(numbers, dtype=torch.float64)])))


@pytest.mark.parametrize("kind", ["asgd", "schedule-free"])
def test_an_optimizer_that_averages_weights_itself_stays_equal_without_a_spread(kind, monkeypatch):
    """With a spread its state would part, also where moments are averaged: that is why it is refused."""
    assert run_replicas(_averages_of_its_own, 2, kind, 0.0) == [True, True]
    assert run_replicas(_parted, 2, kind) == [False, False]


def _parted(rank, kind):
    table = list(OPTIMIZERS)
    OPTIMIZERS.clear()
    try:
        return _averages_of_its_own(rank, kind, 0.5)
    finally:
        OPTIMIZERS[:] = table

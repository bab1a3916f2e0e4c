"""What gave silent nonsense is found: NaN at spread 0, replicas that drift apart, models that do not fit."""

from __future__ import annotations

import warnings

import pytest
import schedulefree
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.helpers.models import Net, batch
from tests.helpers.replicas import run_replicas

EQUAL = [hdet.LearningRate(0.0)]


def train(ensemble, model, optimizer, rank, steps, spoil=None):
    """Plain steps; ``spoil(step)`` is called before each."""
    for step in steps:
        if spoil is not None:
            spoil(step)
        x, y = batch(rank, step)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ensemble.step(loss)


def build(rank, **settings):
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    settings = {"explore": EQUAL, "sync_every": 5, "records": hdet.Records(), "total_steps": 40} | settings
    return net, model, optimizer, hdet.Ensemble(optimizer, model=model, **settings)


def everybodys(tensor):
    """The tensor of both ranks."""
    both = [torch.zeros_like(tensor) for _ in range(2)]
    dist.all_gather(both, tensor.detach().contiguous())
    return both


def _message(error, call):
    try:
        call()
    except error as raised:
        return str(raised)
    return "nothing was raised"


# --- not finite -----------------------------------------------------------------------------------


def _nan_in_a_gradient(rank, how):
    net, model, optimizer, ensemble = build(rank, average_tail=0.5)

    def spoil(step):
        if step == 7 and rank == 1:
            with torch.no_grad():
                net.w1[0, 0] = torch.nan  # its loss is NaN, and DDP gives the NaN to all

    if how == "sync":
        return _message(
            hdet.AllReplicasFailedError, lambda: train(ensemble, model, optimizer, rank, range(10), spoil)
        )
    train(ensemble, model, optimizer, rank, range(9), spoil)
    act = {"save": ensemble.state_dict, "converge": ensemble.converge, "finish": ensemble.finish}[how]
    return _message(hdet.NotFiniteError, act)


@pytest.mark.parametrize("how", ["sync", "save", "converge", "finish"])
def test_nan_is_found_where_nothing_is_explored(how):
    for message in run_replicas(_nan_in_a_gradient, 2, how):
        assert "not finite" in message
        assert "resume from the last checkpoint" in message


def _one_bad_replica(rank):
    records = hdet.Records()
    net, model, optimizer, ensemble = build(rank, records=records)
    train(ensemble, model, optimizer, rank, range(4))
    if rank == 1:  # a fault of this rank alone, after its last step of the round
        optimizer.register_step_post_hook(
            lambda *_: net.w1.data.fill_(torch.nan) if ensemble.num_steps == 4 else None
        )
    train(ensemble, model, optimizer, rank, range(4, 20))
    weights = [torch.equal(*everybodys(p)) for p in net.parameters()]
    moments = [torch.equal(*everybodys(optimizer.state[p]["exp_avg"])) for p in net.parameters()]
    return weights, moments, [record.excluded for record in records]


def test_one_bad_replica_is_healed_where_nothing_is_explored():
    (weights, moments, excluded), _ = run_replicas(_one_bad_replica, 2)
    assert all(weights) and all(moments)
    assert excluded == [{1: "parameters are not finite"}, {}, {}, {}]


# --- replicas that ought to be equal --------------------------------------------------------------


def _drifting(rank, size):
    net, model, optimizer, ensemble = build(rank)

    def spoil(step):
        if step == 2 and rank == 1:
            with torch.no_grad():
                net.b2.mul_(1 + size)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        message = _message(
            hdet.ReplicasDifferError, lambda: train(ensemble, model, optimizer, rank, range(5), spoil)
        )
    told = [str(w.message) for w in caught if issubclass(w.category, hdet.HdetWarning)]
    return message, told, all(torch.equal(*everybodys(p)) for p in net.parameters())


def test_replicas_that_drift_apart_are_found_and_named():
    for message, _, _ in run_replicas(_drifting, 2, 0.2):
        assert "at step 5 all replicas must hold the same parameters" in message
        assert "'b2' by" in message


def test_rounding_is_averaged_away_with_a_word():
    (message, told, are_equal), (_, silent, _) = run_replicas(_drifting, 2, 1e-12)
    assert message == "nothing was raised"
    assert len(told) == 1 and "differ by rounding" in told[0] and not silent
    assert are_equal


def _warm_started(rank, when):
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    if when == "before":
        hdet.warm_start(model, 0.05)
    ensemble = hdet.Ensemble(optimizer, model=model, explore=EQUAL, sync_every=5)  # nothing else to sync for
    if when == "after":
        ensemble.warm_start(0.05)
    apart = not torch.equal(*everybodys(net.w1))
    train(ensemble, model, optimizer, rank, range(10))
    return apart, torch.equal(*everybodys(net.w1))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_warm_start_is_averaged_at_the_first_sync(when):
    assert run_replicas(_warm_started, 2, when) == [(True, True)] * 2


def _two_optimizers(rank):
    """hdet sees one of them; the other has another learning rate on every rank."""
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam([net.w1, net.b1], lr=0.01)
    other = torch.optim.Adam([net.w2, net.b2], lr=0.01 * (1 + rank))
    ensemble = hdet.Ensemble(
        optimizer,
        model=model,
        explore=EQUAL,
        sync_every=10,
        controller=hdet.Guard(),
        total_steps=400,
    )

    def run():
        for step in range(200):
            x, y = batch(rank, step)
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad(), other.zero_grad()
            loss.backward()
            optimizer.step(), other.step()
            ensemble.step(loss)

    return _message(hdet.ReplicasDifferError, run)


def test_a_second_optimizer_that_parts_the_replicas_is_found():
    for message in run_replicas(_two_optimizers, 2):
        assert "give hdet the optimizer of all trained parameters" in message


# --- what is refused ------------------------------------------------------------------------------


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
        told = _message((TypeError, ValueError), lambda: hdet.Ensemble(optimizer, **settings))
        if what == "fsdp1":

            def search():
                hdet.find_lr(settings["model"], optimizer, [], lambda m, b: m(b), total_steps=100)

            assert _message(TypeError, search) == told
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
    return torch.equal(*everybodys(torch.cat([*kept, torch.tensor(numbers, dtype=torch.float64)])))


@pytest.mark.parametrize("kind", ["asgd", "schedule-free"])
def test_an_optimizer_that_averages_weights_itself_stays_equal_without_a_spread(kind, monkeypatch):
    """With a spread its state would part, also where moments are averaged: that is why it is refused."""
    assert run_replicas(_averages_of_its_own, 2, kind, 0.0) == [True, True]
    assert run_replicas(_parted, 2, kind) == [False, False]


def _parted(rank, kind):
    from hdet.ensemble import construction

    refuse, construction.refuse = construction.refuse, lambda *_, **__: None
    try:
        return _averages_of_its_own(rank, kind, 0.5)
    finally:
        construction.refuse = refuse


def _compiled(rank):
    torch.manual_seed(0)
    net = Net()
    ddp = DistributedDataParallel(net)
    model = torch.compile(ddp, backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    data = [batch(rank, step) for step in range(20)]
    seen = set()

    def loss(model, data):
        seen.add(type(model).__name__)
        return (model(data[0]) - data[1]).square().mean()

    found = hdet.find_lr(model, optimizer, data, loss, total_steps=100)
    ensemble = hdet.Ensemble(optimizer, model=model, explore=EQUAL, sync_every=5, records=hdet.Records())

    def spoil(step):
        if step == 2 and rank == 1:
            with torch.no_grad():
                net.b2.mul_(1.2)

    told = _message(
        hdet.ReplicasDifferError, lambda: train(ensemble, model, optimizer, rank, range(5), spoil)
    )
    return found.lr, seen, told


def test_a_compiled_ddp_model_is_searched_and_named_as_the_one_inside():
    (lr, seen, told), (other, _, _) = run_replicas(_compiled, 2)
    assert lr == other and seen == {"Net"}
    assert "'b2' by" in told

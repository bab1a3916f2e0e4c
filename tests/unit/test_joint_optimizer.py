"""JointOptimizer: several optimizers as one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.helpers.models import Net, batch
from tests.helpers.replicas import run_replicas


def loss_of(model, data):
    x, y = data
    return (model(x) - y).square().mean()


def parts_of(net):
    return (
        torch.optim.SGD([net.w1, net.w2], lr=0.01, momentum=0.9),
        torch.optim.AdamW([net.b1, net.b2], lr=0.001),
    )


def descend(net, optimizers, steps, auto=None, rank=0, model=None):
    for step in steps:
        loss = loss_of(model or net, batch(rank, step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if auto is not None:
            auto.step(loss)


def test_it_is_its_optimizers_one_after_the_other():
    joint_net, net = Net(), Net()
    joint = hdet.JointOptimizer(*parts_of(joint_net))
    descend(joint_net, [joint], range(20))
    descend(net, parts_of(net), range(20))
    assert all(torch.equal(a, b) for a, b in zip(joint_net.parameters(), net.parameters(), strict=True))
    assert len(joint.state) == 4


def test_a_checkpoint_goes_on_to_the_bit():
    net = Net()
    joint = hdet.JointOptimizer(*parts_of(net))
    descend(net, [joint], range(10))
    saved = copy.deepcopy((net.state_dict(), joint.state_dict()))
    other = Net()
    again = hdet.JointOptimizer(*parts_of(other))
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    descend(net, [joint], range(10, 20))
    descend(other, [again], range(10, 20))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    assert again.param_groups[0] is again.optimizers[0].param_groups[0]


def _found_on_rank(rank):
    net = Net()
    model = DistributedDataParallel(net)
    joint = hdet.JointOptimizer(*parts_of(net))
    found = hdet.find_lr(model, joint, [batch(rank, i) for i in range(60)], loss_of, total_steps=200)
    auto = hdet.AutoLR(joint, total_steps=200, model=model, found=found)
    before = loss_of(net, batch(9, 0)).item()
    descend(net, [joint], range(200), auto, rank, model)
    return found.lr, before, loss_of(net, batch(9, 0)).item(), [p.detach() for p in net.parameters()]


def test_its_learning_rates_are_found_and_scheduled_in_proportion_on_ranks():
    (lr, before, after, mine), (same, _, _, theirs) = run_replicas(_found_on_rank, 2)
    assert lr == same
    assert lr[0] / lr[1] == pytest.approx(10)
    assert after < 0.7 * before
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_the_search_leaves_all_of_them_as_they_were():
    net = Net()
    joint = hdet.JointOptimizer(*parts_of(net))
    descend(net, [joint], range(5))
    before = copy.deepcopy((net.state_dict(), joint.state_dict()))
    hdet.find_lr(net, joint, [batch(0, i) for i in range(60)], loss_of, total_steps=200)
    after = net.state_dict(), joint.state_dict()
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0)


def test_bad_arguments():
    net = Net()
    sgd, adam = parts_of(net)
    with pytest.raises(ValueError, match="optimizers must be at least one"):
        hdet.JointOptimizer()
    with pytest.raises(TypeError, match=r"optimizers must be torch\.optim\.Optimizer objects, got 3"):
        hdet.JointOptimizer(sgd, 3)
    with pytest.raises(ValueError, match="must not share a parameter"):
        hdet.JointOptimizer(sgd, torch.optim.SGD([net.w1], lr=0.1))
    with pytest.raises(ValueError, match="must hold 2 parameter groups, got 1"):
        hdet.JointOptimizer(sgd, adam).load_state_dict(sgd.state_dict())

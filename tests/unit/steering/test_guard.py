"""The guard: a run that loses what it had learnt goes back, with a lower learning rate."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.method.guard import Guard, GuardMemory, watch
from tests.helpers.models import Net, batch
from tests.helpers.replicas import run_replicas

STEPS, SYNC = 200, 5


def train(rank, *, guard, is_spoilt=True, steps=STEPS, drawn=None):
    """At step 100 the weights are spoilt once, as by a learning rate that is too high."""
    net = Net()
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    records = hdet.Records()
    ensemble = hdet.Ensemble(
        optimizer,
        model=model,
        explore=[hdet.LearningRate(spread=0)],
        sync_every=SYNC,
        total_steps=STEPS,
        controllers=[] if guard is None else [guard],
        records=records if rank == 0 else None,
    )
    for step in range(steps):
        x, y = batch(rank, step)
        if drawn is not None:
            drawn.append(torch.rand(1, dtype=torch.float64).item())
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if is_spoilt and step == 100:
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(20)
        ensemble.step(loss)
    return net, ensemble, list(records), loss.item()


def test_a_run_that_collapses_goes_back_with_a_third_of_the_learning_rate(caplog):
    with caplog.at_level(logging.WARNING):
        _, ensemble, records, guarded = train(0, guard=Guard())
    *_, unguarded = train(0, guard=None)
    *_, good = train(0, guard=Guard(), is_spoilt=False)
    assert guarded < 0.5 * unguarded
    assert guarded < 1.5 * good
    assert ensemble.found_lr["lr"] == pytest.approx(0.05 / 3)
    assert [record.controllers["guard"].num_brakes for record in records if record.step < 105] == [0] * 20
    assert records[-1].controllers["guard"].num_brakes == 1
    assert sum("the loss has collapsed" in message for message in caplog.messages) == 1


def test_a_run_that_does_not_collapse_is_left_alone():
    net, ensemble, _, _ = train(0, guard=Guard(), is_spoilt=False)
    plain, *_ = train(0, guard=None, is_spoilt=False)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))
    assert ensemble.found_lr["lr"] == 0.05


def test_random_numbers_go_on_after_it_has_gone_back():
    torch.manual_seed(0)
    drawn = []
    _, _, records, _ = train(0, guard=Guard(), drawn=drawn)
    assert records[-1].controllers["guard"].num_brakes == 1
    assert len(set(drawn)) == STEPS  # none is drawn again


def test_a_run_without_a_good_copy_begins_again(caplog):
    with caplog.at_level(logging.WARNING):
        _, ensemble, records, _ = train(0, guard=Guard(expected_loss=1e-6))
    assert records[-1].controllers["guard"].num_brakes == 1
    assert ensemble.found_lr["lr"] == pytest.approx(0.05 / 3)
    assert "the run has lost all that it had learnt, so it begins again" in caplog.text


def test_a_run_that_learns_slowly_is_left_alone():
    _, _, records, _ = train(0, guard=Guard(expected_loss=1e-6), is_spoilt=False)
    assert records[-1].controllers["guard"].num_brakes == 0


def _on_rank(rank):
    net, ensemble, _, _ = train(rank, guard=Guard())
    return [p.detach() for p in net.parameters()], ensemble.found_lr


def test_ranks_go_back_together():
    (mine, found), (theirs, same) = run_replicas(_on_rank, 2)
    assert found == same
    assert found["lr"] == pytest.approx(0.05 / 3)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_virtual_replicas_go_back_too(spread):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    records = hdet.Records()
    ensemble = hdet.VirtualEnsemble(
        net,
        optimizer,
        lambda model, data: (model(data[0]) - data[1]).square().mean(),
        num_replicas=2,
        join_equal=True,
        explore=[hdet.LearningRate(spread=spread)],
        sync_every=SYNC,
        total_steps=STEPS,
        controllers=[Guard()],
        records=records,
    )
    losses = []
    for step in range(STEPS):
        if step == 101:
            for matrix in ensemble.replicas.rows.matrices:
                matrix.mul_(20)
        losses.append(ensemble.step(batches=[batch(0, step), batch(1, step)]).mean().item())
    assert records[-1].controllers["guard"].num_brakes == 1
    assert ensemble.found_lr["lr"] == pytest.approx(0.05 / 3)
    assert sum(losses[-20:]) / 20 < 1.2 * sum(losses[80:100]) / 20 < 0.2 * max(losses[101:])


def test_what_it_remembers_is_in_the_checkpoint():
    _, ensemble, _, _ = train(0, guard=Guard(), steps=150)
    state = ensemble.state_dict()
    _, other, _, _ = train(0, guard=Guard(), steps=1, is_spoilt=False)
    other.load_state_dict(state)
    again = other.state_dict()["controllers"]
    torch.testing.assert_close(again, state["controllers"], rtol=0, atol=0, equal_nan=True)
    assert list(again["guard"]["copies"]) == ["first", "older", "newer"]
    assert other.found_lr["lr"] == pytest.approx(0.05 / 3)


def scripted(guard, losses, state=None):
    """A run of nothing but losses, whose only weight counts the steps."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    explore = [hdet.LearningRate(0.0)]
    told = {"explore": explore, "sync_every": 2, "total_steps": 100, "controllers": [guard]}
    ensemble = hdet.Ensemble(optimizer, **told)
    if state is not None:
        with torch.no_grad():
            weight.fill_(float(state["num_steps"]))
        ensemble.load_state_dict(state)
    for loss in losses[ensemble.num_steps :]:
        weight.grad = torch.zeros(1)
        optimizer.step()
        with torch.no_grad():
            weight += 1
        ensemble.step(loss)
    return weight.item(), ensemble


COLLAPSES = [*(4.0 - 0.05 * step for step in range(50)), *[9.0] * 10]


@pytest.mark.parametrize("steps", [2, 26, 50, 51, 52, 53])
def test_a_resume_before_a_brake_or_within_a_collapse_goes_back_as_far(steps):
    _, stopped = scripted(Guard(interval=0.1), COLLAPSES[:steps])
    stopped.converge()
    state = stopped.state_dict()
    for end, weight in ((54, 40), (58, 0)):  # to the older of two copies, and then to the first weights
        assert scripted(Guard(interval=0.1), COLLAPSES[:end])[0] == weight
        assert scripted(Guard(interval=0.1), COLLAPSES[:end], state)[0] == weight


@pytest.mark.parametrize("steps", [50, 53])
def test_a_resumed_guard_that_has_no_copies_does_not_go_back_to_a_collapse(steps):
    guard = Guard(interval=0.1, saves_copies=False)
    _, stopped = scripted(guard, COLLAPSES[:steps])
    stopped.converge()
    state = stopped.state_dict()
    assert state["controllers"]["guard"]["copies"] == {}
    with pytest.raises(hdet.HdetError, match=f"go on from a checkpoint before step {steps}, with a lower"):
        scripted(guard, COLLAPSES, state)
    falling = [*COLLAPSES[:50], *[1.5] * 15, *[9.0] * 4]  # it has copies of its own by then
    if steps == 50:
        assert scripted(guard, falling, state)[0] == 61


def after(*losses):
    memory = GuardMemory()
    for loss in losses:
        memory = watch(memory, loss, Guard())
    return memory


FALLING = (4.0, 3.5, 3.0, 2.5, 2.2, *[2.0] * 20)


@pytest.mark.parametrize("loss, is_bad", [(2.5, False), (2.9, False), (3.2, True), (9.0, True)])
def test_half_of_the_gain_is_a_collapse(loss, is_bad):
    assert after(*FALLING, loss).num_bad == is_bad


def test_one_bad_round_is_forgiven_and_two_are_not():
    assert after(*FALLING, 3.9, 2.0, 3.9).num_bad == 1
    assert after(*FALLING, 3.9, 3.9).num_bad == 2


def test_what_is_within_the_noise_is_no_collapse():
    noisy = [4.0 + 0.8 * (-1) ** i - 0.05 * i for i in range(30)]
    assert all(after(*noisy[:count]).num_bad == 0 for count in range(1, 31))
    assert after(*noisy, 20.0).num_bad == 1


def test_where_it_cannot_work_it_says_so():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="total_steps must be given for a Guard"):
        hdet.Ensemble(optimizer, controllers=[Guard()])
    with pytest.raises(ValueError, match="for a Guard to lower"):
        hdet.Ensemble(optimizer, controllers=[Guard()], total_steps=10, explore=[hdet.Momentum(0.1)])

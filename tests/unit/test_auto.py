"""AutoLR: one recipe, the same numbers through every door."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.lab.tasks import load_task
from hdet.lab.tasks.quadratic import Quadratic
from hdet.lab.tasks.task import Task
from hdet.lab.train.config import RunConfig
from hdet.lab.train.folder import RunFolder
from hdet.lab.train.runner import evaluate, run
from hdet.method.recipe import Recipe
from hdet.replicas.rows import join
from tests.helpers.models import Net, batch, linear, mean_square
from tests.helpers.replicas import run_replicas

STEPS, REPLICAS = 200, 8


def streams_of(task: Task) -> list[Any]:
    return [task.train_batches(seed=0, replica=r) for r in range(REPLICAS)]


def found_for(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> hdet.FoundLR:
    streams = streams_of(task)
    batches = (join([next(stream) for stream in streams]) for _ in itertools.count())
    return hdet.find_lr(model, optimizer, batches, task.loss, total_steps=STEPS, probe=[task.probe_batch()])


def test_the_door_in_python_and_the_command_give_the_same_numbers(tmp_path):
    task, lr = Quadratic(size=20), 0.01
    model = task.build_model(0)
    optimizer = torch.optim.AdamW(task.parameter_groups(model), lr=lr, weight_decay=0.0)
    found = found_for(task, model, optimizer)
    auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, found=found)
    streams = streams_of(task)
    for _ in range(STEPS):
        loss = task.loss(model, join([next(stream) for stream in streams]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)

    config = RunConfig(task="quadratic", lr=lr, steps=STEPS, replicas=REPLICAS)
    by_command = run(config, RunFolder.create(tmp_path / "run", config, {}), task=task)
    assert by_command.final_loss == pytest.approx(evaluate(task, model)["loss"], rel=1e-5)
    assert by_command.found_lr == pytest.approx(found.lr[0]) != lr
    search = hdet.read_records(tmp_path / "run/records.jsonl")[0].search
    assert search is not None
    assert (search.asked, search.found) == (lr, pytest.approx(found.lr[0]))


def test_the_settings_of_a_run_are_the_recipe_unless_they_say_otherwise():
    plain = RunConfig(task="quadratic", lr=0.1, steps=1000)
    recipe = Recipe(total_steps=1000)
    assert (plain.warmup, plain.anneal, plain.anneal_to) == (recipe.warmup, recipe.anneal, recipe.anneal_to)
    assert (plain.average_tail, plain.sync_every) == (recipe.average_tail, recipe.steps_per_round)
    assert (plain.find, plain.controllers, plain.spread) == (True, ("guard",), 0.0)
    compared = RunConfig(task="quadratic", lr=0.1, steps=1000, controllers=("log",))
    assert (compared.spread, compared.average_tail, compared.anneal_to) == (1 / 9, 0.0, 0.0)
    assert not RunConfig(task="quadratic", lr=0.1, steps=49).find


def loss_of(model: nn.Module, data: Any) -> torch.Tensor:
    x, y = data
    return (model(x) - y).square().mean()


def train(auto: Any, model: nn.Module, optimizer: Any, rank: int, steps: int) -> None:
    for step in range(auto.num_steps, auto.num_steps + steps):
        loss = loss_of(model, batch(rank, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)


def _on_ranks(rank: int) -> tuple[Any, ...]:
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    batches = [batch(rank, step) for step in range(100)]
    found = hdet.find_lr(model, optimizer, batches, loss_of, total_steps=400)
    auto = hdet.AutoLR(optimizer, total_steps=400, model=model, found=found)
    train(auto, model, optimizer, rank, 400)
    return auto.found_lr, auto.summary(), [p.detach() for p in net.parameters()]


def test_it_finds_and_trains_on_ranks():
    (found, summary, mine), (_, _, theirs) = run_replicas(_on_ranks, 2)
    assert 10 < found["lr"] / 1e-4 < 1e4
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert "step 400 of 400, 2 replicas" in summary
    assert "your guess was 0.001). The best one is probably between" in summary


def _that_differ(rank: int, with_controller: bool) -> tuple[Any, ...]:
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    records = hdet.Records()
    auto = hdet.AutoLR(
        optimizer,
        total_steps=40,
        model=model,
        spread=0.5,
        explore=[hdet.Epsilon(spread=0.25)],
        probe=hdet.Probe([batch(7, 7)], loss_of),
        controllers=[hdet.Controller()] if with_controller else [],
        sync_every=10,
        records=records,
    )
    in_round = []
    for _ in range(4):
        train(auto, model, optimizer, rank, 9)
        in_round.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["eps"]))
        train(auto, model, optimizer, rank, 1)
    return in_round, [p.detach() for p in net.parameters()], list(records)


@pytest.mark.parametrize("with_controller", [False, True])
def test_replicas_differ_and_converge_through_it(with_controller: bool):
    (mine, parameters, records), (theirs, others, _) = run_replicas(_that_differ, 2, with_controller)
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    for (lr, epsilon), (other_lr, other_epsilon) in zip(mine, theirs, strict=True):
        assert max(lr, other_lr) / min(lr, other_lr) == pytest.approx(3)
        assert max(epsilon, other_epsilon) / min(epsilon, other_epsilon) == pytest.approx(1.25**2)
    assert all(len(record.probes) == 2 and record.converged for record in records)
    assert all(("comparing" in record.controllers) == with_controller for record in records)


def test_a_checkpoint_brings_what_was_found_and_the_search_is_not_repeated():
    def build(found: hdet.FoundLR | None) -> tuple[Net, Any, hdet.AutoLR]:
        net = Net()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
        return net, optimizer, hdet.AutoLR(optimizer, total_steps=400, model=net, found=found)

    net = Net()
    searched = torch.optim.Adam(net.parameters(), lr=1e-4)
    batches = [batch(0, step) for step in range(100)]
    found = hdet.find_lr(net, searched, batches, loss_of, total_steps=400)
    net, optimizer, auto = build(found)
    train(auto, net, optimizer, 0, 100)
    saved = copy.deepcopy((auto.state_dict(), net.state_dict(), optimizer.state_dict()))
    other_net, other, again = build(None)
    other_net.load_state_dict(saved[1])
    other.load_state_dict(saved[2])
    again.load_state_dict(saved[0])
    assert again.found_lr == auto.found_lr == {"lr": pytest.approx(found.lr[0])}
    train(auto, net, optimizer, 0, 300)
    train(again, other_net, other, 0, 300)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other_net.parameters(), strict=True))


def test_a_run_with_a_thermostat_begins_at_twice_the_answer_but_not_at_twice_the_guess():
    def peak(found: hdet.FoundLR, *controllers: Any) -> tuple[float, str]:
        net = Net()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
        probe = hdet.Probe([batch(7, 7)], loss_of) if controllers else None
        auto = hdet.AutoLR(
            optimizer, total_steps=400, model=net, found=found, controllers=controllers, probe=probe
        )
        return auto.found_lr["lr"], auto.summary()

    net = Net()
    batches = [batch(0, step) for step in range(100)]
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    found = hdet.find_lr(net, optimizer, batches, loss_of, total_steps=400)
    (lr, told), (doubled, steered) = peak(found), peak(found, hdet.Thermostat())
    assert doubled == pytest.approx(2 * lr) and lr == found.lr[0]
    assert "twice" in steered and "twice" not in told
    guess = dataclasses.replace(found, lr=found.asked)
    assert peak(guess, hdet.Thermostat())[0] == 1e-4


@pytest.mark.parametrize("total_steps", [199, 801])
def test_a_run_of_another_length_than_the_search_is_warned_of(total_steps: int):
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    found = hdet.find_lr(net, optimizer, [batch(0, 0)], loss_of, total_steps=400)
    hdet.AutoLR(optimizer, total_steps=400 - found.num_steps, model=net, found=found).close()
    with pytest.warns(hdet.HdetWarning, match=f"a run of 400 steps, but total_steps is {total_steps}"):
        hdet.AutoLR(optimizer, total_steps=total_steps, model=net, found=found).close()
    earlier = hdet.FoundLR(**{k: v for k, v in vars(found).items() if k != "total_steps"})
    hdet.AutoLR(optimizer, total_steps=total_steps, model=net, found=earlier)


def test_what_was_found_is_recorded():
    net, records = Net(), hdet.Records()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    found = hdet.find_lr(net, optimizer, [batch(0, 0)], loss_of, total_steps=100)
    auto = hdet.AutoLR(optimizer, total_steps=100, model=net, found=found, records=records)
    train(auto, net, optimizer, 0, 100)
    first, *rest = records
    assert first.search is not None
    assert (first.search.found, first.search.num_steps) == (found.lr[0], found.num_steps)
    assert all(record.search is None for record in rest)


def test_bad_arguments():
    optimizer = torch.optim.Adam(Net().parameters(), lr=1e-3)
    with pytest.raises(ValueError, match="total_steps must be an integer of at least 1, got 0"):
        hdet.AutoLR(optimizer, total_steps=0)


def test_every_built_in_task_takes_the_search():
    for name in ("charlm", "feed", "digits"):
        task = load_task(name)
        model = task.build_model(0)
        optimizer = torch.optim.AdamW(task.parameter_groups(model), lr=task.learning_rate)
        assert found_for(task, model, optimizer).lr[0] > 0, name


def test_the_peak_of_a_one_cycle_that_was_there_before_is_the_peak():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=1000)
    auto = hdet.AutoLR(optimizer, total_steps=100, model=net)
    assert auto.found_lr == {"lr": 0.02}
    assert auto.base["lr"] == pytest.approx(0.02 / 25)


def test_an_answer_that_is_not_used_is_warned_of():
    def searched():
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        batches = [torch.randn(16, 4) for _ in range(20)]
        loss_of = lambda model, x: (model(x) - x.sum(dim=1, keepdim=True)).square().mean()  # noqa: E731
        return optimizer, hdet.find_lr(net, optimizer, batches, loss_of, total_steps=60)

    optimizer, found = searched()
    with pytest.warns(
        hdet.HdetWarning, match=r"find_lr has found .* trains with your guess: pass found=found"
    ):
        hdet.AutoLR(optimizer, total_steps=60)
    optimizer, found = searched()  # no warning: found is given, written, or another rate was chosen
    hdet.AutoLR(optimizer, total_steps=60, found=found).close()
    optimizer, found = searched()
    found.write(optimizer)
    hdet.AutoLR(optimizer, total_steps=60).close()
    optimizer, _ = searched()
    optimizer.param_groups[0]["lr"] = 0.5
    hdet.AutoLR(optimizer, total_steps=60).close()


def test_a_number_of_an_epoch_is_no_loss():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    auto = hdet.AutoLR(optimizer, total_steps=60)
    with pytest.raises(TypeError, match=r"got the integer 3: step.. takes the loss, not the number"):
        auto.step(3)


def test_auto_lr_does_not_train_with_a_learning_rate_of_zero():
    model, optimizer = linear(lr=0.0)
    with pytest.raises(
        ValueError, match="lr must be above 0 in one group at least, got 0 in all: give any guess"
    ):
        hdet.AutoLR(optimizer, total_steps=100, model=model)


def test_a_summary_tells_what_was_found_after_a_resume_too():
    model, optimizer = linear(1e-4)
    data = [torch.randn(16, 3) for _ in range(9)]
    found = hdet.find_lr(model, optimizer, data, mean_square, total_steps=100)
    auto = hdet.AutoLR(optimizer, total_steps=100, model=model, found=found)
    auto.converge()
    model, optimizer = linear(1e-4)
    resumed = hdet.AutoLR(optimizer, total_steps=100, model=model)
    resumed.load_state_dict(auto.state_dict())
    assert resumed.summary().splitlines()[0] == f"found: {found}"

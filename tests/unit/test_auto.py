"""AutoLR: one recipe, the same numbers through every door."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.run.config import RunConfig
from hdet.run.folder import RunFolder
from hdet.run.runner import evaluate, run
from hdet.tasks import load_task
from hdet.tasks.quadratic import Quadratic
from research.peers import METHODS
from tests.helpers.models import Net, batch
from tests.helpers.replicas import run_replicas

STEPS, REPLICAS = 200, 4


def auto_of(task: Any, lr: float) -> hdet.VirtualAutoLR:
    model = task.build_model(0)
    optimizer = torch.optim.AdamW(task.parameter_groups(model), lr=lr, weight_decay=0.0)
    probe_batch = task.probe_batch()
    return hdet.VirtualAutoLR(
        model,
        optimizer,
        task.loss,
        total_steps=STEPS,
        num_replicas=REPLICAS,
        probe=lambda m: task.loss(m, probe_batch),
        steps_per_epoch=math.inf,
        vectorize=task.can_vectorize,
    )


def test_the_door_in_python_the_command_and_the_comparison_give_the_same_numbers(tmp_path):
    task, lr = Quadratic(size=20), 0.01
    auto = auto_of(task, lr)
    streams = [task.train_batches(seed=0, replica=r) for r in range(REPLICAS)]
    for _ in range(STEPS):
        auto.step([next(stream) for stream in streams])
    in_python = evaluate(task, auto.model)["loss"]

    config = RunConfig(task="quadratic", lr=lr, steps=STEPS, replicas=REPLICAS)
    by_command = run(config, RunFolder.create(tmp_path / "run", config, {}), task=task)
    compared = METHODS["hdet_both"].train(task, lr, STEPS, 0, REPLICAS, "adamw")
    assert in_python == by_command.final_loss == compared.final_loss
    (found,) = auto.found_lr.values()
    assert found == pytest.approx(by_command.found_lr) == pytest.approx(compared.found_lr)
    assert found != lr


def test_the_settings_of_a_run_are_the_recipe_unless_they_say_otherwise():
    plain = RunConfig(task="quadratic", lr=0.1, steps=1000)
    recipe = hdet.core.recipe.Recipe(total_steps=1000)
    assert (plain.warmup, plain.anneal, plain.anneal_to) == (recipe.warmup, recipe.anneal, recipe.anneal_to)
    assert (plain.average_tail, plain.sync_every) == (recipe.average_tail, recipe.steps_per_round)
    assert (plain.scout, plain.controller, plain.spread, plain.per_group) == (True, "anchored", 0.0, True)
    compared = RunConfig(task="quadratic", lr=0.1, steps=1000, controller="log")
    assert (compared.spread, compared.average_tail, compared.anneal_to) == (1 / 9, 0.0, 0.0)
    assert not RunConfig(task="quadratic", lr=0.1, steps=50).scout


def train(auto: Any, model: nn.Module, optimizer: Any, rank: int, steps: int) -> None:
    for step in range(auto.num_steps, auto.num_steps + steps):
        x, y = batch(rank, step)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)


def _on_ranks(rank: int) -> tuple[Any, ...]:
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    auto = hdet.AutoLR(optimizer, total_steps=400, model=model)
    was_scouting = auto.is_scouting
    train(auto, model, optimizer, rank, 400)
    return (
        was_scouting,
        auto.is_scouting,
        auto.found_lr,
        auto.summary(),
        [p.detach() for p in net.parameters()],
    )


def test_two_lines_on_ranks():
    (was, now, found, summary, mine), (_, _, _, _, theirs) = run_replicas(_on_ranks, 2)
    assert (was, now) == (True, False)
    assert 10 < found["lr"] / 1e-4 < 1e4
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert "step 400 of 400, 2 replicas" in summary
    assert "the scout took" in summary and "lr: asked for 0.0001, now" in summary


def test_it_tells_what_it_is_doing(caplog):
    net = Net()
    optimizer = torch.optim.Adam([{"params": [net.w1, net.b1]}, {"params": [net.w2, net.b2]}], lr=1e-3)
    auto = hdet.AutoLR(optimizer, total_steps=1000, model=net)
    assert auto.found_lr == {"lr.0": 1e-3, "lr.1": 1e-3}
    assert "still trying learning rates" in auto.summary()
    with caplog.at_level(logging.INFO, logger="hdet"):
        train(auto, net, optimizer, 0, 500)
    told = [r.getMessage() for r in caplog.records if "the scout has decided" in r.getMessage()]
    assert len(told) == 1 and "asked for was 0.001" in told[0]
    assert not auto.is_scouting
    assert set(auto.found_lr) == {"lr.0", "lr.1"}
    saved = auto.state_dict()
    again = hdet.AutoLR(torch.optim.Adam(optimizer.param_groups, lr=1e-3), total_steps=1000, model=net)
    again.load_state_dict(saved)
    assert again.summary() == auto.summary()


def test_a_run_that_is_too_short_for_the_scout_says_so(caplog):
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    auto = hdet.AutoLR(optimizer, total_steps=100, model=net)
    assert not auto.is_scouting
    assert "the scout is left out: it needs 480 steps with 1 replicas, and the run has 100" in caplog.text


def test_bad_arguments():
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    with pytest.raises(ValueError, match="total_steps must be an integer of at least 1, got 0"):
        hdet.AutoLR(optimizer, total_steps=0)
    with pytest.raises(TypeError, match=r"steps_per_epoch must be an integer .* math.inf says"):
        hdet.AutoLR(optimizer, total_steps=1000, steps_per_epoch=2.5)


def test_every_built_in_task_takes_the_recipe():
    for name in ("charlm", "feed", "digits"):
        task = load_task(name)
        auto = auto_of(task, task.learning_rate)
        losses = auto.step([next(task.train_batches(seed=0, replica=r)) for r in range(REPLICAS)])
        assert torch.isfinite(losses).all(), name


def test_the_peak_of_a_one_cycle_that_was_there_before_is_where_the_search_starts():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=1000)
    auto = hdet.AutoLR(optimizer, total_steps=100, model=net)
    assert auto.found_lr == {"lr": 0.02}
    assert auto.base["lr"] == pytest.approx(0.02 / 25)


def test_a_save_between_syncs_is_warned_of_on_one_device():
    task = Quadratic(size=4)
    auto = auto_of(task, 0.01)
    streams = [task.train_batches(seed=0, replica=r) for r in range(REPLICAS)]
    while auto.is_scouting or auto.engine.num_steps % 25 == 0:
        auto.step([next(stream) for stream in streams])
    with pytest.warns(hdet.NotConvergedWarning, match="not in the model yet"):
        auto.state_dict()

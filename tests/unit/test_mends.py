"""Mistakes that were silent once, or were answered with the wrong remedy."""

from __future__ import annotations

import copy
import logging
import math
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.ensemble.sync import LossTable, excluded_replicas
from hdet.replicas import Report
from hdet.replicas.losses import LossSum


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def build(lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def train(model, optimizer, scheduler, num_steps: int) -> list[float]:
    rates = []
    for step in range(num_steps):
        loss = loss_of(model, torch.full((4, 3), 1.0 + step % 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


# --- the paper's controller -----------------------------------------------------------------------


@pytest.mark.parametrize(("start", "is_told"), [(0, True), (20, True), (30, False), (50, False)])
def test_a_controller_that_takes_over_inside_the_warm_up_is_told(start: int, is_told: bool):
    _, optimizer = build()
    settings = {"max_lr": 0.1, "total_steps": 100, "model_sync_interval": 5, "enable_auto_lr": True}
    with pytest.warns(hdet.HdetWarning) as told:
        hdet.OneCycleAutoLR(optimizer, auto_lr_warmup_steps=start, ensemble_lr_spread_ratio=0.1, **settings)
    texts = [
        str(one.message) for one in told if "never reached: pass auto_lr_warmup_steps=30" in str(one.message)
    ]
    assert len(texts) == is_told


@pytest.mark.parametrize("form", ["paper", "log"])
def test_a_controller_with_one_replica_is_told(form: str):
    _, optimizer = build()
    with pytest.warns(
        hdet.HdetWarning, match="with one replica: only its decay acts. Train on several ranks"
    ):
        hdet.Ensemble(optimizer, controller=hdet.Controller(form=form))


def test_a_controller_that_reaches_its_limit_is_told():
    model, optimizer = build()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    ensemble = hdet.VirtualEnsemble(
        model,
        optimizer,
        loss_of,
        num_replicas=4,
        sync_every=1,
        explore=[hdet.WeightDecay(3.0, scale="log")],
        controller=hdet.Controller(step_size=1.0, momentum=0.0, max_correction=2.0),
        probe=lambda model: model.weight.square().sum(),  # more decay is always better
    )
    with pytest.warns(hdet.HdetWarning, match=r"moved weight_decay to 0\.2, the limit of max_correction=2"):
        for _ in range(10):
            ensemble.step(torch.ones(4, 3))


def test_bounds_that_stop_a_controller_are_told():
    model, optimizer = build()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    ensemble = hdet.VirtualEnsemble(
        model,
        optimizer,
        loss_of,
        num_replicas=4,
        sync_every=1,
        explore=[hdet.WeightDecay(0.5, bounds=(0.0, 0.15))],
        controller=hdet.Controller(step_size=1.0, momentum=0.0),
        probe=lambda model: model.weight.square().sum(),
    )
    with pytest.warns(hdet.HdetWarning, match="the limit of its bounds"):
        for _ in range(30):
            ensemble.step(torch.ones(4, 3))


# --- errors and their remedies --------------------------------------------------------------------


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_nan_of_all_names_the_hook_where_one_batch_may_have_spread_it(num_replicas: int):
    reports = [Report(LossSum(), False, None)] * num_replicas
    with pytest.raises(hdet.AllReplicasFailedError, match="with a lower learning rate") as failure:
        excluded_replicas(LossTable(num_replicas), reports, 7)
    assert ("hdet.finite_mean_hook" in str(failure.value)) == (num_replicas > 1)


def test_auto_lr_does_not_train_with_a_learning_rate_of_zero():
    model, optimizer = build(lr=0.0)
    with pytest.raises(
        ValueError, match="lr must be above 0 in one group at least, got 0 in all: give any guess"
    ):
        hdet.AutoLR(optimizer, total_steps=100, model=model)


def test_replicas_that_are_no_process_group_are_called_replicas():
    model, optimizer = build()
    words = "^replicas must be None while torch.distributed is not running, got 'all': call"
    with pytest.raises(ValueError, match=words):
        hdet.Ensemble(optimizer, replicas="all")
    with pytest.raises(ValueError, match=words):
        hdet.AutoLR(optimizer, total_steps=100, model=model, replicas="all")
    with pytest.raises(ValueError, match=words):
        hdet.find_lr(model, optimizer, [torch.ones(4, 3)], loss_of, total_steps=100, replicas="all")


def test_a_replay_closes_like_the_other_schedulers():
    _, optimizer = build()
    optimizer.param_groups[0]["weight_decay"] = 0.5
    schedule = {"lr": [0.1, 0.2], "weight_decay": [0.3, 0.4]}
    with hdet.ReplayLR(optimizer, schedule, explore=[hdet.WeightDecay(0.0)]) as replay:
        optimizer.step()
        replay.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.4  # a replay has no values of its own to take back
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["weight_decay"] == 0.4
    optimizer.param_groups[0]["weight_decay"] = 0.7
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["weight_decay"] == 0.7, "after close() nothing is written any more"
    replay.close()


# --- parameters that come and go ------------------------------------------------------------------


def ensembles(model: nn.Module, optimizer: torch.optim.Optimizer):
    """Build one of each kind, as a function that makes a step."""
    batch = torch.ones(4, 3)

    def stepping(scheduler):
        return lambda: train(model, optimizer, scheduler, 1)

    virtual = hdet.VirtualEnsemble(model, optimizer, loss_of, num_replicas=2, sync_every=3)
    yield lambda: virtual.step(batch)
    virtual.close()
    cycle = {"max_lr": 0.1, "total_steps": 20}
    settings = {"explore": [hdet.LearningRate(0.0)], "average_tail": 0.5, "total_steps": 6}
    for build_one in (
        lambda: hdet.AutoLR(optimizer, total_steps=20, model=model, sync_every=3),
        lambda: hdet.Ensemble(optimizer, model=model, sync_every=3, controller=hdet.Controller()),
        lambda: hdet.Ensemble(optimizer, model=model, **settings),  # no rounds, but a tail
        lambda: hdet.OneCycleAutoLR(
            optimizer, model=model, model_sync_interval=3, records=hdet.Records(), **cycle
        ),
    ):
        with build_one() as scheduler:
            yield stepping(scheduler)


@pytest.mark.filterwarnings("ignore:the controller has nothing to compare")
@pytest.mark.parametrize("which", range(5))
def test_a_parameter_group_that_is_added_later_is_noticed_at_the_step(which: int):
    model, optimizer = build()
    for i, step in enumerate(ensembles(model, optimizer)):
        if i == which:
            step()
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
            with pytest.raises(
                hdet.HdetError,
                match="1 parameter groups when the ensemble was built, but it has 2 now: build the ensemble",
            ):
                step()
            return


@pytest.mark.filterwarnings("ignore:the controller has nothing to compare")
@pytest.mark.parametrize("which", range(5))
def test_a_layer_that_is_replaced_is_noticed_at_the_sync(which: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for i, step in enumerate(ensembles(model, optimizer)):
        if i == which:
            step()
            model[1] = nn.Linear(3, 1)
            with pytest.raises(
                hdet.HdetError, match=r"2 parameters of the model were replaced .*: build the optimizer and"
            ):
                for _ in range(3):
                    step()
            return


def test_parameters_may_be_frozen_and_read_again_during_a_run():
    model, optimizer = build()
    auto = hdet.AutoLR(optimizer, total_steps=10, model=model, sync_every=2)
    train(model, optimizer, auto, 3)
    model.bias.requires_grad_(False)
    optimizer.load_state_dict(optimizer.state_dict())
    model.load_state_dict(model.state_dict())
    train(model, optimizer, auto, 3)
    model.bias.requires_grad_(True)
    model.teacher = nn.Linear(3, 1).requires_grad_(False)
    train(model, optimizer, auto, 4)
    assert auto.num_steps == 10


# --- batches of virtual replicas ------------------------------------------------------------------


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_batch_of_a_data_loader_is_one_batch_for_all_replicas(kind: type, vectorize: bool):
    def pairs(model: nn.Module, batch) -> torch.Tensor:
        x, y = batch
        return (model(x) - y[:, :1]).square().mean()

    model, optimizer = build()
    ensemble = hdet.VirtualEnsemble(model, optimizer, pairs, num_replicas=2, vectorize=vectorize)
    batch = kind([torch.ones(4, 3), torch.full((4, 3), 2.0)])
    expected = pairs(model, batch).item()
    assert ensemble.step(batch).tolist() == pytest.approx([expected, expected])


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, TypeError, r"must be given either batch or batches, got neither: pass step\(batch\)"),
        ({"batch": torch.ones(4, 3), "batches": [torch.ones(4, 3)] * 2}, TypeError, "got both"),
        ({"batches": [torch.ones(4, 3)] * 3}, ValueError, r"batches must be 2, one per replica, got 3"),
        ({"batches": torch.ones(2, 4, 3)}, TypeError, "batches must be a list of 2 batches, one per replica"),
    ],
)
def test_what_a_step_of_virtual_replicas_is_given_is_said_explicitly(given, error, words: str):
    ensemble = hdet.VirtualEnsemble(*build(), loss_of, num_replicas=2)
    with pytest.raises(error, match=words):
        ensemble.step(**given)
    assert ensemble.engine.num_steps == 0


# --- states ---------------------------------------------------------------------------------------


def test_a_state_of_another_model_is_refused_before_anything_changes():
    model, optimizer = build()
    state = train_and_save(model, optimizer)
    other = nn.Linear(4, 1)
    auto = hdet.AutoLR(torch.optim.AdamW(other.parameters(), lr=0.1), total_steps=100, model=other)
    with pytest.raises(ValueError, match="a run that trains 5 parameters, got one of 4: build the model"):
        auto.load_state_dict(state)
    assert auto.num_steps == 0


def test_a_state_of_other_rounds_is_told(caplog: pytest.LogCaptureFixture):
    state = train_and_save(*build())
    model, optimizer = build()
    auto = hdet.AutoLR(optimizer, total_steps=100, model=model, sync_every=7)
    with caplog.at_level(logging.WARNING):
        auto.load_state_dict(state)
    assert "rounds of 5 steps, and these have 7" in caplog.text


def test_a_state_without_these_entries_still_loads():
    state = train_and_save(*build())
    old = {
        name: value for name, value in state.items() if name not in ("sync_every", "num_elements", "found")
    }
    model, optimizer = build()
    auto = hdet.AutoLR(optimizer, total_steps=100, model=model)
    auto.load_state_dict(old)
    assert auto.num_steps == 10


def train_and_save(model, optimizer) -> dict:
    auto = hdet.AutoLR(optimizer, total_steps=100, model=model, sync_every=5)
    train(model, optimizer, auto, 10)
    auto.converge()
    return auto.state_dict()


def test_a_summary_tells_what_was_found_after_a_resume_too():
    model, optimizer = build(1e-4)
    data = [torch.randn(16, 3) for _ in range(9)]
    found = hdet.find_lr(model, optimizer, data, loss_of, total_steps=100)
    auto = hdet.AutoLR(optimizer, total_steps=100, model=model, found=found)
    auto.converge()
    model, optimizer = build(1e-4)
    resumed = hdet.AutoLR(optimizer, total_steps=100, model=model)
    resumed.load_state_dict(auto.state_dict())
    assert resumed.summary().splitlines()[0] == f"found: {found}"


# --- copies of a scheduler ------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copied_scheduler_goes_on_as_the_original_does(duplicate):
    model, optimizer = build()
    scheduler = hdet.OneCycleAutoLR(optimizer, max_lr=0.1, total_steps=40, model=model)
    train(model, optimizer, scheduler, 13)
    again = duplicate(scheduler)
    assert isinstance(again, OneCycleLR) and again is not scheduler
    assert again.optimizer.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]
    copied = again.ensemble.optimizer
    assert copied is again.optimizer is not optimizer
    twin = nn.Linear(3, 1)
    twin.weight, twin.bias = copied.param_groups[0]["params"]
    assert train(twin, copied, again, 27) == train(model, optimizer, scheduler, 27)
    assert torch.equal(twin.weight, model.weight) and math.isfinite(twin.bias.item())


# --- a search -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (
            {"total_steps": 10**12},
            ValueError,
            "must be at most 100000000.*not examples or tokens",
        ),
        (
            {"batches": None},
            TypeError,
            "batches must be a DataLoader or a list of batches.* got None",
        ),
        ({"probe": torch.zeros(0, 3)}, ValueError, "probe must hold at least one example, got none"),
    ],
)
def test_a_search_names_what_is_wrong(wrong: dict, error: type[Exception], words: str):
    model, optimizer = build()
    settings = {"batches": [torch.randn(16, 3)] * 9, "loss": loss_of, "total_steps": 100} | wrong
    with pytest.raises(error, match=words):
        hdet.find_lr(model, optimizer, **settings)


# --- records --------------------------------------------------------------------------------------


def test_a_base_that_had_to_be_halved_is_in_the_records():
    model, optimizer = build()
    first, records = model.weight.detach().clone(), hdet.Records()
    ensemble = hdet.VirtualEnsemble(
        model,
        optimizer,
        loss_of,
        num_replicas=2,
        sync_every=1,
        explore=[hdet.LearningRate(0.9)],
        controller=hdet.Controller(form="paper", step_size=1.0, momentum=0.0, temperature=1e-9),
        probe=lambda model: (model.weight - first).abs().sum(),  # the lowest learning rate wins
        records=records,
    )
    for _ in range(3):
        ensemble.step(torch.ones(4, 3))
    assert any("must stay above zero" in record.limited.get("lr", "") for record in records)
    assert all(record.base["lr"] > 0 for record in records)


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (torch.tensor(3), "got torch.int64: a loss is no whole number"),
        ((torch.tensor(0.5), torch.tensor(1.0)), "got .* of type tuple"),
        ([torch.tensor(0.5)], "got .* of type list"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss, words: str):
    model, optimizer = build()
    auto = hdet.AutoLR(optimizer, total_steps=100, model=model)
    with pytest.raises(TypeError, match=words):
        auto.step(loss)


@pytest.mark.parametrize(("returned", "remedy"), [(None, "give the loss alone"), (0.5, "leave out .item")])
def test_a_loss_function_that_returns_no_tensor_is_told_what_to_return(returned, remedy: str):
    model, optimizer = build()
    data = [torch.randn(16, 3)] * 9
    with pytest.raises(TypeError, match=f"loss must return a tensor with one element, got .*: {remedy}"):
        hdet.find_lr(model, optimizer, data, lambda model, batch: returned, total_steps=100)

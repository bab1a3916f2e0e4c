"""The ensemble in one process: step accounting, schedules, values, state."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import hdet
from hdet.ensemble.sync import LossTable, excluded_replicas
from hdet.replicas import ReplicaGroup, Report
from hdet.replicas.losses import LossSum
from tests.helpers.models import Net, batch, loss_of


def make(**settings: Any) -> tuple[torch.optim.Optimizer, hdet.Ensemble]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    return optimizer, hdet.Ensemble(optimizer, **settings)


def of_four(index: int) -> ReplicaGroup:
    """One of four replicas without a process group: its values can be looked at."""
    return ReplicaGroup(index, 4)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine, recursive": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=30),
    "exponential, recursive": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.97),
    "step, recursive": lambda o: lr_scheduler.StepLR(o, step_size=7),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.98),
    "warmup-stable-decay": lambda o: lr_scheduler.LambdaLR(o, lambda t: min(t / 5, 1.0, (30 - t) / 10)),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(o, T_max=25)],
        milestones=[5],
    ),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=30, cycle_momentum=False),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, total_iters=30),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_any_schedule_plans_the_base_as_if_it_were_alone(name: str, tensor_lr: bool) -> None:
    plain, optimizer = (
        torch.optim.SGD(
            [nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1, dtype=torch.float64) if tensor_lr else 0.1
        )
        for _ in range(2)
    )
    plain_scheduler = SCHEDULERS[name](plain)
    ensemble = hdet.Ensemble(
        optimizer,
        scheduler=SCHEDULERS[name](optimizer),
        explore=[hdet.LearningRate(0.5)],
        sync_every=4,
        replicas=of_four(2),
    )
    used = set()
    for _ in range(30):
        rho = ensemble.multipliers["lr"]
        used.add(rho)
        assert ensemble.base["lr"] == pytest.approx(float(plain.param_groups[0]["lr"]), rel=1e-12)
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(rho * ensemble.base["lr"], rel=1e-12)
        optimizer.step(), plain.step()
        ensemble.step(1.0), plain_scheduler.step()
    assert len(used) > 1


def test_a_tensor_learning_rate_is_written_in_place() -> None:
    lr = torch.tensor(0.1)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=lr)
    tensor = optimizer.param_groups[0]["lr"]
    ensemble = hdet.Ensemble(optimizer, explore=[hdet.LearningRate(0.5)], sync_every=2, replicas=of_four(0))
    for _ in range(6):
        optimizer.step()
        ensemble.step()
        assert optimizer.param_groups[0]["lr"] is tensor
        assert tensor.item() == pytest.approx(0.1 * ensemble.multipliers["lr"])


def test_a_float_learning_rate_stays_a_float() -> None:
    optimizer, ensemble = make(explore=[hdet.LearningRate(0.5)], replicas=of_four(0))
    assert type(optimizer.param_groups[0]["lr"]) is float
    optimizer.step()
    ensemble.step()
    assert type(optimizer.param_groups[0]["lr"]) is float


def test_a_tensor_that_groups_share_is_given_to_each() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]
    optimizer = torch.optim.Adam(groups, lr=torch.tensor(0.1, dtype=torch.float64))
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]  # torch's doing
    ensemble = hdet.Ensemble(optimizer, explore=[hdet.LearningRate(0.2)], replicas=of_four(0))
    for load in (False, True):
        if load:
            optimizer.load_state_dict(optimizer.state_dict())
        for _ in range(4):
            optimizer.step()
            ensemble.step()
        for group, rho in zip(optimizer.param_groups, ensemble.multipliers.values(), strict=True):
            assert float(group["lr"]) == pytest.approx(0.1 * rho)


def test_a_tensor_of_one_dimension_is_recorded() -> None:
    records = hdet.Records()
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=torch.tensor([0.1]))
    ensemble = hdet.Ensemble(optimizer, sync_every=2, records=records)
    for _ in range(2):
        optimizer.step()
        ensemble.step(1.0)
    assert records[0].base_trace["lr"] == pytest.approx([0.1])


def test_somebody_elses_tensor_is_found_at_a_sync() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1))
    ensemble = hdet.Ensemble(optimizer, sync_every=1, replicas=of_four(0))
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(0.7)
    with pytest.warns(hdet.HdetWarning, match="changed by something other than hdet"):
        ensemble.step(1.0)
    assert ensemble.base["lr"] == pytest.approx(0.7)


# --- step accounting ------------------------------------------------------------------------------


@pytest.mark.parametrize("sets_to_none", [True, False])
@pytest.mark.parametrize("is_after_step", [True, False])
def test_a_call_before_the_step_of_the_optimizer_is_warned_of_once(
    sets_to_none: bool, is_after_step: bool
) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    ensemble = hdet.Ensemble(optimizer, total_steps=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.zero_grad(set_to_none=sets_to_none)
            parameter.square().sum().backward()
            if not is_after_step:
                ensemble.step(1.0)
            optimizer.step()
            if is_after_step:
                ensemble.step(1.0)
    texts = [str(warning.message) for warning in caught]
    if is_after_step:
        assert not texts
    else:
        (text,) = texts
        assert "between backward() and optimizer.step()" in text
        assert caught[0].filename == __file__


@pytest.mark.parametrize("kind", ["zeroed twice", "another network", "skipped first"])
def test_a_call_after_the_step_is_never_warned_of(kind: str) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(optimizer, total_steps=9)
    for step in range(4):
        layer(torch.ones(1, 2)).sum().backward()
        if kind != "skipped first" or step > 0:
            optimizer.step()
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
        if kind == "another network":  # a GAN: the generator's backward pass goes through the discriminator
            layer(torch.ones(1, 2)).sum().backward()
        elif kind == "skipped first" and step == 0:
            layer.weight.grad = torch.ones(2, 2)
        ensemble.step(1.0)
        optimizer.zero_grad()
    assert ensemble.num_steps == (3 if kind == "skipped first" else 4)


def test_gradients_of_inference_mode_can_be_stepped_with() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    ensemble = hdet.Ensemble(optimizer, total_steps=4)
    for _ in range(3):
        with torch.inference_mode():
            gradient = torch.ones(2)
        parameter.grad = gradient
        ensemble.step(1.0)
        optimizer.step()
    assert ensemble.num_steps == 2


def test_a_call_without_an_optimizer_step_counts_nothing_but_takes_the_loss() -> None:
    """Gradient accumulation, and frameworks that call once per process."""
    records = hdet.Records()
    optimizer, ensemble = make(sync_every=2, records=records)
    for losses in ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0)):
        optimizer.step()
        for loss in losses:
            ensemble.step(loss)
    assert ensemble.num_steps == 2
    # At the sync, the first loss of the second step had been seen; the rest belongs to the next round.
    assert records[0].losses == [2.5]


def test_dummy_optimizer_steps_count_nothing() -> None:
    optimizer, ensemble = make(sync_every=100)
    for _ in range(3):
        optimizer.step()
    ensemble.step()
    assert ensemble.num_steps == 1


def test_an_optimizer_that_is_never_seen_to_step_leaves_every_call_counted() -> None:
    _, ensemble = make(sync_every=100)
    for _ in range(3):
        ensemble.step()
    assert ensemble.num_steps == 3


@pytest.mark.parametrize("fault", ["built anew", "copied"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_no_longer_trains_is_told_within_a_few_steps(fault: str, fused: bool) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    ensemble = hdet.Ensemble(optimizer, sync_every=5)

    def train(num_steps: int) -> None:
        for step in range(num_steps):
            loss_of(net, batch(0, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            ensemble.step()

    train(10)
    if fault == "copied":
        net, optimizer, ensemble = copy.deepcopy((net, optimizer, ensemble))
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    with pytest.warns(hdet.HdetWarning, match="the optimizer that hdet was given makes no step"):
        train(8)
    assert ensemble.num_steps == 10


def test_weights_that_are_exchanged_between_micro_batches_are_not_told() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(optimizer, sync_every=5)
    for step in range(300):
        loss_of(net, batch(0, step)).backward()
        if step % 30 == 29:
            optimizer.step()
            optimizer.zero_grad()
        for p in net.parameters():  # a moving average is evaluated, and the weights put back
            p.data = p.data.clone()
        ensemble.step()
    assert ensemble.num_steps == 10


def test_observed_micro_batches_make_the_mean() -> None:
    records = hdet.Records()
    optimizer, ensemble = make(sync_every=1, records=records)
    for loss in (1.0, 2.0, 6.0):
        ensemble.observe(loss)
    optimizer.step()
    ensemble.step()
    assert records[0].losses == [3.0]


def test_a_step_that_the_gradient_scaler_skips_does_not_count() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    ensemble = hdet.Ensemble(optimizer, sync_every=100)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf"), 1.0):
        loss = (parameter * factor).sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        ensemble.step(loss)
    assert ensemble.num_steps == 2
    optimizer.step()
    ensemble.step(1.0, skipped=True)  # a fused optimizer skips inside its step
    assert ensemble.num_steps == 2


def test_running_past_the_end_of_a_schedule_that_would_raise() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5, cycle_momentum=False)
    ensemble = hdet.Ensemble(optimizer, scheduler=scheduler)
    assert ensemble.total_steps == 5
    with pytest.warns(hdet.HdetWarning, match="after total_steps=5") as caught:
        for _ in range(9):
            optimizer.step()
            ensemble.step(1.0)
    assert len(caught) == 1
    assert ensemble.num_steps == 9


def test_after_a_resume_every_call_needs_an_optimizer_step() -> None:
    optimizer, ensemble = make(sync_every=100)
    optimizer.step()
    ensemble.step()
    other, resumed = make(sync_every=100)
    resumed.load_state_dict(ensemble.state_dict())
    for _ in range(3):
        resumed.step(1.0)  # gradients are being accumulated
    other.step()
    resumed.step(1.0)
    assert resumed.num_steps == 2


def test_a_repeated_call_after_the_end_is_no_news() -> None:
    optimizer, ensemble = make(total_steps=2)
    for _ in range(2):
        optimizer.step()
        for _ in range(4):
            ensemble.step(1.0)
    assert ensemble.num_steps == 2


def test_the_last_step_is_a_sync() -> None:
    records = hdet.Records()
    optimizer, ensemble = make(sync_every=4, total_steps=10, records=records)
    for _ in range(10):
        optimizer.step()
        ensemble.step(1.0)
    assert [record.step for record in records] == [4, 8, 10]
    assert [record.round for record in records] == [0, 1, 2]


# --- values ---------------------------------------------------------------------------------------


def test_base_values_and_close_restore() -> None:
    optimizer, ensemble = make(explore=[hdet.LearningRate(0.5)], replicas=of_four(1))
    mine = optimizer.param_groups[0]["lr"]
    assert mine != 0.1
    with ensemble.base_values():
        assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["lr"] == mine
    ensemble.close()
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1


def test_base_values_can_be_nested() -> None:
    optimizer, ensemble = make(explore=[hdet.LearningRate(0.5)], replicas=of_four(1))
    with ensemble.base_values():
        with ensemble.base_values():
            pass
        assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_controller_of_the_papers_form_waits_while_the_base_is_zero() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    ensemble = hdet.Ensemble(
        optimizer,
        scheduler=lr_scheduler.LambdaLR(optimizer, lambda t: max(0, t - 3) / 10),
        explore=[hdet.LearningRate(floor=1e-3)],
        sync_every=2,
        total_steps=20,
        controllers=[hdet.Controller(form="paper", end="floor")],
    )
    for _ in range(10):
        optimizer.step()
        ensemble.step(1.0)
    assert ensemble.base["lr"] > 0


def test_one_dial_for_all_groups_keeps_their_proportions() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.3)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    ensemble = hdet.Ensemble(
        optimizer,
        explore=[hdet.LearningRate(0.5, per_group=False)],
        sync_every=1,
        replicas=of_four(0),
        total_steps=2,
        controllers=[hdet.Controller(form="paper", end=0.5)],
    )
    optimizer.step()
    ensemble.step(1.0)
    rho = ensemble.multipliers["lr"]
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.05 * rho, 0.15 * rho])


def test_groups_are_named() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "name": name} for name in ("body", "head")]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert set(hdet.Ensemble(optimizer).base) == {"lr.body", "lr.head"}


def test_somebody_elses_learning_rate_becomes_the_plan_with_a_warning() -> None:
    optimizer, ensemble = make(explore=[hdet.LearningRate(0.5)], replicas=of_four(0))
    optimizer.param_groups[0]["lr"] = 0.7
    optimizer.step()
    with pytest.warns(hdet.HdetWarning, match=r"changed by something other than hdet.*scheduler="):
        ensemble.step()
    assert ensemble.base["lr"] == 0.7


def test_a_saved_optimizer_holds_the_plan_and_loading_keeps_the_multiplier() -> None:
    optimizer, _ = make(explore=[hdet.LearningRate(0.5)], replicas=of_four(0))
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.1
    other, ensemble = make(explore=[hdet.LearningRate(0.5)], replicas=of_four(1))
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == pytest.approx(0.1 * ensemble.multipliers["lr"])
    assert ensemble.multipliers["lr"] != 1


def test_state_survives_a_file_and_the_order_of_loading_does_not_matter(tmp_path: Any) -> None:
    def build() -> tuple[torch.optim.Optimizer, hdet.Ensemble]:
        optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=0.1)
        scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        return optimizer, hdet.Ensemble(
            optimizer,
            scheduler=scheduler,
            explore=[hdet.LearningRate(0.5)],
            sync_every=3,
            controllers=[hdet.Controller()],
            replicas=of_four(1),
        )

    optimizer, ensemble = build()
    for _ in range(7):
        optimizer.step()
        ensemble.step(1.0)
    torch.save(
        {"optimizer": optimizer.state_dict(), "ensemble": ensemble.state_dict()}, tmp_path / "state.pt"
    )
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    expected = optimizer.param_groups[0]["lr"]
    for order in (("optimizer", "ensemble"), ("ensemble", "optimizer")):
        new_optimizer, new_ensemble = build()
        for which in order:
            (new_optimizer if which == "optimizer" else new_ensemble).load_state_dict(state[which])
        assert new_optimizer.param_groups[0]["lr"] == expected
        for each_optimizer, each in ((optimizer, ensemble), (new_optimizer, new_ensemble)):
            each_optimizer.step()
            each.step(1.0)
        assert new_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        expected = optimizer.param_groups[0]["lr"]
        state = {"optimizer": optimizer.state_dict(), "ensemble": ensemble.state_dict()}


def test_state_of_other_hyperparameters_is_refused() -> None:
    _, ensemble = make()
    state = ensemble.state_dict()
    state["tunables"] = {"lr.0": state["tunables"]["lr"]}
    with pytest.raises(ValueError, match=r"must hold the hyperparameters \['lr'\], got \['lr.0'\]"):
        ensemble.load_state_dict(state)


def test_no_healthy_replica_is_an_error_that_says_what_to_do() -> None:
    optimizer, ensemble = make(sync_every=1)
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].fill_(float("nan"))
    optimizer.step()
    with pytest.raises(hdet.AllReplicasFailedError, match=r"at step 1 .* not finite.* resume from the last"):
        ensemble.step(1.0)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_nan_of_all_names_the_hook_where_one_batch_may_have_spread_it(num_replicas: int):
    reports = [Report(LossSum(), False, None)] * num_replicas
    with pytest.raises(hdet.AllReplicasFailedError, match="with a lower learning rate") as failure:
        excluded_replicas(LossTable(num_replicas), reports, 7)
    assert ("hdet.finite_mean_hook" in str(failure.value)) == (num_replicas > 1)


# --- replay ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["paper", "log"])
def test_a_learned_schedule_replays_exactly(form: Any) -> None:
    records = hdet.Records()
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.3)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    ensemble = hdet.Ensemble(
        optimizer,
        scheduler=lr_scheduler.CosineAnnealingLR(optimizer, T_max=40),
        explore=[hdet.LearningRate(0.5)],
        sync_every=5,
        total_steps=43,
        controllers=[hdet.Controller(form=form, start=10, end=0.48 if form == "paper" else 1.0)],
        records=records,
    )
    bases = [list(ensemble.base.values())]
    for step in range(1, 44):
        optimizer.step()
        ensemble.step(1.0)
        if step == 22:
            ensemble.converge()  # a save within a round
        bases.append(list(ensemble.base.values()))
    assert [(r.step, r.ends_round) for r in records if 20 <= r.step <= 25] == [
        (20, True),
        (22, False),
        (25, True),
    ]
    schedule = hdet.export_schedule(records)
    replayed = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)], lr=1.0)
    scheduler = hdet.ReplayLR(replayed, schedule)
    for step, expected in enumerate(bases):
        assert scheduler.get_last_lr() == expected, step
        replayed.step()
        scheduler.step()
    assert scheduler.get_last_lr() == bases[-1]


def test_other_hyperparameters_replay_too() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, list[Any]]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2), nn.Dropout(0.1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        return model, optimizer, [hdet.WeightDecay(), hdet.Momentum(), hdet.Dropout(model)]

    records = hdet.Records()
    model, optimizer, others = build()
    ensemble = hdet.Ensemble(
        optimizer,
        explore=[hdet.LearningRate(), *others],
        sync_every=2,
        total_steps=10,
        controllers=[hdet.Controller(form="paper", end=0.8)],
        records=records,
    )
    bases = []
    for _ in range(10):
        bases.append(ensemble.base)
        optimizer.step()
        ensemble.step(1.0)
    model, optimizer, others = build()
    scheduler = hdet.ReplayLR(optimizer, hdet.export_schedule(records), explore=others)
    for base in bases:
        (group,) = optimizer.param_groups
        assert group["lr"] == base["lr"]
        assert group["weight_decay"] == pytest.approx(base["weight_decay"], rel=1e-12)
        assert group["betas"][0] == pytest.approx(base["momentum"], rel=1e-12)
        assert model[1].p == pytest.approx(base["dropout"], rel=1e-12)
        assert model[2].p == pytest.approx(base["dropout"] / 2, rel=1e-12)
        optimizer.step()
        scheduler.step()
    assert bases[-1]["dropout"] < 0.2
    with pytest.raises(ValueError, match=r"got \['beta2'\] beside"):
        hdet.ReplayLR(optimizer, hdet.export_schedule(records), explore=[hdet.Beta2()])


def test_replay_of_one_dial_for_all_groups_keeps_their_proportions() -> None:
    def groups() -> list[dict[str, Any]]:
        return [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.01)]

    records = hdet.Records()
    optimizer = torch.optim.SGD(groups(), lr=0.1)
    ensemble = hdet.Ensemble(
        optimizer,
        scheduler=lr_scheduler.ExponentialLR(optimizer, 0.9),
        explore=[hdet.LearningRate(per_group=False)],
        sync_every=2,
        total_steps=6,
        records=records,
    )
    seen = []
    for _ in range(6):
        seen.append([g["lr"] for g in optimizer.param_groups])
        optimizer.step()
        ensemble.step(1.0)
    replayed = torch.optim.SGD([{"params": g["params"]} for g in groups()], lr=1.0)
    scheduler = hdet.ReplayLR(replayed, hdet.export_schedule(records))
    for expected in seen:
        assert scheduler.get_last_lr() == expected
        replayed.step()
        scheduler.step()


def test_replay_survives_loading_the_optimizer() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.1, weight_decay=0.1)
    schedule = {"lr": [0.1] * 6, "weight_decay": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}
    scheduler = hdet.ReplayLR(optimizer, schedule, explore=[hdet.WeightDecay()])
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    optimizer.load_state_dict(optimizer.state_dict())
    for expected in (0.3, 0.4, 0.5):
        assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(expected)
        optimizer.step()
        scheduler.step()


def test_replay_refuses_what_does_not_fit() -> None:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)], lr=1.0)
    with pytest.raises(ValueError, match="for 2 groups"):
        hdet.ReplayLR(optimizer, {"lr.0": [1.0], "lr.1": [1.0], "lr.2": [1.0]})
    with pytest.raises(ValueError, match="at least one record"):
        hdet.export_schedule([])
    late = hdet.RoundRecord(round=1, step=20, num_replicas=1, losses=[1.0], num_steps=10)
    with pytest.raises(ValueError, match=r"for steps 11 to 20 after step 0"):
        hdet.export_schedule([late])


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"sync_every": 0}, ValueError, "sync_every must be an integer of at least 1, got 0"),
        ({"sync_every": "10"}, TypeError, "sync_every"),
        ({"explore": []}, ValueError, "explore must name at least one hyperparameter"),
        (
            {"explore": hdet.LearningRate()},
            TypeError,
            r"explore must be a list of hyperparameters, got .* type LearningRate: write",
        ),
        (
            {"explore": ["lr"]},
            TypeError,
            r"explore must hold hyperparameters, got .* write \[hdet.LearningRate\(\)\]",
        ),
        (
            {"explore": [hdet.LearningRate(), hdet.LearningRate()]},
            ValueError,
            r"name each hyperparameter once, got \['lr'\]",
        ),
        (
            {"scheduler": lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([nn.Parameter(torch.ones(1))]))},
            TypeError,
            "got a ReduceLROnPlateau",
        ),
        (
            {"scheduler": torch.optim.Adam([nn.Parameter(torch.ones(1))])},
            TypeError,
            "scheduler must be a schedule .* got the optimizer Adam: leave it out",
        ),
        (
            {"model": nn.Linear(2, 1)},
            ValueError,
            "model must have parameters that the optimizer trains, got a L",
        ),
        ({"scheduler": 3}, TypeError, r"scheduler must have a step\(\) method"),
        ({"model": 3}, TypeError, "model must be"),
        (
            {"controllers": "log"},
            TypeError,
            r"controllers must be a list of controllers, got 'log' .*: write \[",
        ),
        (
            {"controllers": [hdet.Guard]},
            TypeError,
            r"controllers must hold controllers, got .*: write \[hdet\.Guard\(\)\]",
        ),
        ({"total_steps": -1}, ValueError, "total_steps"),
        ({"seed": 1.5}, TypeError, "seed"),
        ({"records": []}, TypeError, "records must have a write"),
        (
            {"assignment": "sobol"},
            ValueError,
            "assignment must be one of 'random', 'paper', 'latin', 'factorial'",
        ),
        ({"moments": "drop"}, ValueError, "moments must be one of 'auto', 'average', 'keep', 'reset'"),
        ({"gradients": "own"}, ValueError, "gradients must be one of 'shared', 'local'"),
        ({"probe": 3}, TypeError, r"probe must be an hdet\.Probe or None, got 3 of type int: write hdet"),
        ({"assignment": "factorial", "replicas": ReplicaGroup(0, 3)}, ValueError, "got 3 replicas for 1"),
        ({"bucket_mib": 0}, ValueError, "bucket_mib must be a number above 0"),
        ({"replicas": "all"}, ValueError, "replicas must be None while"),
        (
            {"controllers": [hdet.Controller(start=100)], "total_steps": 50},
            ValueError,
            "start must leave at least one round to train, got start=100",
        ),
        (
            {"controllers": [hdet.Controller(form="paper", end="floor")], "total_steps": 5000},
            ValueError,
            r"end='floor' needs total_steps and a floor .* no floor for \['lr'\]",
        ),
        (
            {"controllers": [hdet.Controller(form="paper", end=0.22)], "sync_every": 5},
            ValueError,
            "end=0.22 needs total_steps, got total_steps=None: pass total_steps",
        ),
        ({"explore": [hdet.LearningRate(floor=[0.1, 0.1])]}, ValueError, "got 2 for 1 groups"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make(**settings)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"spread": 1.0}, ValueError, r"spread must be a number in \[0, 1\), got 1.0: use scale='log'"),
        ({"spread": -0.1, "scale": "log"}, ValueError, "spread must be a number of at least 0"),
        ({"scale": "even"}, ValueError, "scale must be one of 'linear', 'log'"),
        ({"per_group": 1}, TypeError, "per_group must be True or False"),
        ({"floor": 0.0}, ValueError, "floor must be a number above 0"),
    ],
)
def test_bad_learning_rates(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        hdet.LearningRate(**settings)


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match="same optimizer"):
        make(scheduler=lr_scheduler.ExponentialLR(other, 0.9))


def test_a_guard_that_sees_no_loss_says_so() -> None:
    optimizer, ensemble = make(
        explore=[hdet.LearningRate(0.0)], total_steps=100, sync_every=5, controllers=[hdet.Guard()]
    )
    with pytest.warns(hdet.HdetWarning, match=r"no loss was given to step\(\)"):
        for _ in range(5):
            optimizer.step()
            ensemble.step()


def test_a_state_of_another_version_is_refused_before_anything_changes() -> None:
    optimizer, ensemble = make()
    optimizer.step()
    ensemble.step()
    with pytest.raises(ValueError, match="state_dict must be of version 6, got version 99"):
        ensemble.load_state_dict(ensemble.state_dict() | {"version": 99, "num_steps": 7})
    assert ensemble.num_steps == 1


def test_a_build_for_a_device_that_is_not_there_works_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default install of torch is built for CUDA, and names ``cuda`` also on a machine without one."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # Adam itself asks for the device

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - 1).square().mean()

    found = hdet.find_lr(model, optimizer, [torch.ones(4, 2)], loss_of, total_steps=100)
    auto = hdet.AutoLR(optimizer, total_steps=100, model=model, found=found)
    for _ in range(100):
        loss = loss_of(model, torch.ones(4, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)
    assert loss.item() < 1e-2


def test_a_step_that_is_called_once_per_epoch_is_an_error() -> None:
    optimizer, ensemble = make(sync_every=100)
    optimizer.step()
    ensemble.step(1.0)
    optimizer.step()
    with pytest.raises(hdet.HdetError, match="the optimizer has made 2 since the last call"):
        optimizer.step()


def test_a_step_that_is_never_called_is_an_error() -> None:
    optimizer, ensemble = make(sync_every=100)
    with pytest.raises(
        hdet.HdetError, match="but it was never called, and the optimizer has made 5: call it"
    ):
        for _ in range(10):
            optimizer.step()
    assert ensemble.num_steps == 0


# --- one ensemble at a time -----------------------------------------------------------------------


def test_an_optimizer_is_driven_by_one_ensemble_at_a_time() -> None:
    optimizer, ensemble = make(explore=[hdet.LearningRate(0.5)], replicas=of_four(1))
    mine = optimizer.param_groups[0]["lr"]
    words = r"optimizer must not be driven by another ensemble, .* Call close\(\) on the other"
    builds: list[Callable[[], Any]] = [
        lambda: hdet.Ensemble(optimizer),
        lambda: hdet.AutoLR(optimizer, total_steps=100),
        lambda: hdet.OneCycleAutoLR(optimizer, 0.2, total_steps=100, cycle_momentum=False),
        lambda: hdet.find_lr(nn.Linear(1, 1), optimizer, [], lambda m, b: m(b), total_steps=100),
    ]
    for build in builds:
        with pytest.raises(ValueError, match=words):
            build()
        assert optimizer.param_groups[0]["lr"] == mine
    ensemble.close()
    hdet.AutoLR(optimizer, total_steps=100).close()
    again = hdet.Ensemble(optimizer, explore=[hdet.LearningRate(0.5)], replicas=of_four(1))
    ensemble.close()  # it has let go already
    with pytest.raises(ValueError, match=words):
        hdet.Ensemble(optimizer)
    optimizer.step()
    again.step(1.0)
    assert again.num_steps == 1


def test_a_failed_construction_leaves_the_optimizer_free_and_unchanged() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    before = {**optimizer.param_groups[0]}
    found = hdet.FoundLR(
        lr=[0.7],
        low=[0.1],
        high=[1.0],
        asked=[0.1],
        reason="",
        ramp=[(0.1, 1.0)],
        trials=[],
        num_steps=9,
        total_steps=100,
    )
    with pytest.raises(ValueError, match="shares none with it"):
        hdet.AutoLR(optimizer, total_steps=100, model=nn.Linear(2, 1), found=found)
    assert optimizer.param_groups[0] == before
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got 3"):
        hdet.AutoLR(3, total_steps=100, found=found)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"found must be what hdet.find_lr returned, or None, got 0.1"):
        hdet.AutoLR(optimizer, total_steps=100, found=0.1)  # pyright: ignore[reportArgumentType]
    hdet.AutoLR(optimizer, total_steps=100, found=found)


def test_after_close_nothing_can_be_done() -> None:
    optimizer, ensemble = make()
    optimizer.step()
    ensemble.step(1.0)
    ensemble.close()
    calls: dict[str, Callable[[], None]] = {
        "step": ensemble.step,
        "observe": lambda: ensemble.observe(1.0),
        "converge": ensemble.converge,
        "warm_start": ensemble.warm_start,
    }
    for name, call in calls.items():
        with pytest.raises(hdet.HdetError, match=rf"{name}\(\) must not be called after close\(\)"):
            call()
    with pytest.raises(hdet.HdetError, match=r"after close\(\)"):
        ensemble.finish()
    assert ensemble.num_steps == 1

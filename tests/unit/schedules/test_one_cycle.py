"""OneCycleAutoLR in a single process: it is a OneCycleLR, and bad input never changes anything."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.method.fan_out import multipliers, permutation
from tests.helpers.models import Net, batch, linear, make_optimizer, parameter_groups, train_linear

SCHEDULES: dict[str, dict[str, Any]] = {
    "default": {"max_lr": 0.1, "total_steps": 40},
    "epochs": {"max_lr": 0.1, "epochs": 4, "steps_per_epoch": 10},
    "per group": {"max_lr": [0.1, 0.05, 0.02, 0.01], "total_steps": 40},
    "linear": {"max_lr": 0.1, "total_steps": 40, "anneal_strategy": "linear"},
    "three phases": {"max_lr": 0.1, "total_steps": 40, "three_phase": True},
    "no momentum cycle": {"max_lr": 0.1, "total_steps": 40, "cycle_momentum": False},
    "own momentum": {"max_lr": 0.1, "total_steps": 40, "base_momentum": [0.5] * 4, "max_momentum": 0.8},
    "late peak": {"max_lr": 0.1, "total_steps": 40, "pct_start": 0.9, "div_factor": 3.0},
}


def train(scheduler_class: type, optimizer_name: str, settings: dict[str, Any], *, tensor_lr: bool) -> dict:
    model = Net()
    optimizer = make_optimizer(optimizer_name, parameter_groups(model, 4))
    if tensor_lr:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.1)
    scheduler = scheduler_class(optimizer, **settings)
    seen = []
    for t in range(40):
        seen.append((scheduler.get_last_lr(), [_plain(g) for g in optimizer.param_groups]))
        x, y = batch(0, t)
        loss = (model(nn.functional.dropout(x, 0.1)) - y).square().mean()  # uses the global generator
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss) if isinstance(scheduler, hdet.OneCycleAutoLR) else scheduler.step()
    seen.append((scheduler.get_last_lr(), [_plain(g) for g in optimizer.param_groups]))
    return {
        "seen": seen,
        "parameters": [p.detach().clone() for p in model.parameters()],
        "state": optimizer.state_dict()["state"],
        "rng": torch.get_rng_state(),
        "last_epoch": scheduler.last_epoch,
    }


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}


@pytest.mark.parametrize("settings", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("optimizer_name", ["momentum", "adamw"])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_without_spread_it_is_one_cycle_to_the_bit(
    settings: dict[str, Any], optimizer_name: str, tensor_lr: bool
) -> None:
    torch.manual_seed(7)
    plain = train(OneCycleLR, optimizer_name, settings, tensor_lr=tensor_lr)
    torch.manual_seed(7)
    ours = train(hdet.OneCycleAutoLR, optimizer_name, settings, tensor_lr=tensor_lr)
    assert isinstance(hdet.OneCycleAutoLR(_optimizer(), 0.1, 10), OneCycleLR)
    assert ours["seen"] == plain["seen"]
    assert ours["last_epoch"] == plain["last_epoch"]
    assert torch.equal(ours["rng"], plain["rng"])
    for a, b in zip(ours["parameters"], plain["parameters"], strict=True):
        assert torch.equal(a, b)
    for key, slots in plain["state"].items():
        for name, value in slots.items():
            assert torch.equal(torch.as_tensor(ours["state"][key][name]), torch.as_tensor(value))


def _optimizer(num_groups: int = 1) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(2))]} for _ in range(num_groups)], lr=0.1, momentum=0.9
    )


def test_every_default_is_the_references() -> None:
    import inspect

    parameters = inspect.signature(hdet.OneCycleAutoLR).parameters
    expected = {
        "total_steps": None,
        "epochs": None,
        "steps_per_epoch": None,
        "ensemble_lr_spread_ratio": 0.0,
        "model_sync_interval": 1000,
        "auto_lr_warmup_steps": 100000,
        "enable_auto_lr": False,
        "loss_scale": 0.002,
        "lr_of_lr": 0.5,
        "momentum_of_lr": 0.9,
        "rank": 0,
        "world_size": 1,
    }
    assert {name: parameters[name].default for name in expected} == expected
    torch_parameters = inspect.signature(OneCycleLR).parameters
    assert list(parameters)[: len(torch_parameters)] == list(torch_parameters)
    for name, parameter in torch_parameters.items():
        assert parameters[name].default == parameter.default


def test_a_rank_can_be_looked_at_without_torch_distributed() -> None:
    for rank in range(4):
        with pytest.warns(
            hdet.HdetWarning, match=rf"replica {rank} of 4 .* Call torch.distributed.init_process_group"
        ):
            scheduler = hdet.OneCycleAutoLR(
                _optimizer(),
                0.1,
                40,
                ensemble_lr_spread_ratio=0.2,
                model_sync_interval=10,
                rank=rank,
                world_size=4,
            )
        plain = OneCycleLR(_optimizer(), 0.1, 40)
        for step in range(40):
            rho = multipliers(4, 0.2)[permutation(4, 0, step // 10, "lr")[rank]]
            assert scheduler.get_last_lr() == pytest.approx(
                [lr * rho for lr in plain.get_last_lr()], rel=1e-12
            )
            for each in (plain, scheduler):
                each.optimizer.step()
                each.step()


@pytest.mark.filterwarnings("ignore:auto_lr_warmup_steps=10 lets the controller")
def test_momentum_goes_on_cycling_while_the_controller_holds_the_learning_rate() -> None:
    optimizer, plain_optimizer = _optimizer(), _optimizer()
    with pytest.warns(hdet.HdetWarning, match="spread 0"):
        scheduler = hdet.OneCycleAutoLR(
            optimizer, 0.1, 40, model_sync_interval=5, auto_lr_warmup_steps=10, enable_auto_lr=True
        )
    plain = OneCycleLR(plain_optimizer, 0.1, 40)
    held = []
    for step in range(1, 41):
        optimizer.step(), plain_optimizer.step()
        scheduler.step(1.0), plain.step()
        assert optimizer.param_groups[0]["momentum"] == plain_optimizer.param_groups[0]["momentum"]
        if step < 10:
            assert scheduler.get_last_lr() == plain.get_last_lr()
        elif step < 40:
            held.append(scheduler.get_last_lr()[0])
    assert len(set(held)) == 6  # six rounds, one value each
    # Floor matching: after the last round that trains, the base is the floor of the schedule.
    assert held[-1] == pytest.approx(0.1 / (25 * 1e4))


def test_past_the_end_the_schedule_stays_and_warns_once() -> None:
    optimizer = _optimizer()
    scheduler = hdet.OneCycleAutoLR(
        optimizer, 0.1, 10, anneal_strategy="linear", ensemble_lr_spread_ratio=0.1
    )
    for _ in range(10):
        optimizer.step()
        scheduler.step(1.0)
    last = scheduler.get_last_lr()
    assert last == [0.1 / 25 / 1e4]  # torch's own value here is below zero
    with pytest.warns(hdet.HdetWarning, match="after total_steps=10 steps") as caught:
        for _ in range(5):
            optimizer.step()
            scheduler.step(1.0)
    assert len(caught) == 1
    assert scheduler.get_last_lr() == last
    assert (scheduler.ensemble.num_steps, scheduler.last_epoch) == (15, 10)


def test_last_epoch_resumes_without_a_state() -> None:
    optimizer = _optimizer()
    plain = OneCycleLR(optimizer, 0.1, 40)
    for _ in range(12):
        optimizer.step()
        plain.step()
    resumed = hdet.OneCycleAutoLR(
        optimizer,
        0.1,
        40,
        last_epoch=plain.last_epoch - 1,
        ensemble_lr_spread_ratio=0.1,
        model_sync_interval=5,
    )
    assert resumed.last_epoch == resumed.ensemble.num_steps == 12
    assert resumed.get_last_lr() == plain.get_last_lr()


def test_state_of_a_plain_one_cycle_loads() -> None:
    optimizer = _optimizer()
    plain = OneCycleLR(optimizer, 0.1, 40)
    for _ in range(7):
        optimizer.step()
        plain.step()
    ours = hdet.OneCycleAutoLR(_optimizer(), 0.1, 40)
    ours.load_state_dict(plain.state_dict())
    assert ours.last_epoch == ours.ensemble.num_steps == 7


def test_state_is_plain_and_loads_with_weights_only(tmp_path: Any) -> None:
    optimizer = _optimizer(4)
    scheduler = hdet.OneCycleAutoLR(optimizer, 0.1, 40, ensemble_lr_spread_ratio=0.1, model_sync_interval=5)
    for _ in range(7):
        optimizer.step()
        scheduler.step(torch.tensor(0.5))
    torch.save(scheduler.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    fresh = hdet.OneCycleAutoLR(_optimizer(4), 0.1, 40, ensemble_lr_spread_ratio=0.1, model_sync_interval=5)
    fresh.load_state_dict(loaded)
    assert fresh.state_dict() == scheduler.state_dict()
    assert fresh.get_last_lr() == scheduler.get_last_lr()


GOOD: dict[str, Any] = {"max_lr": 0.1, "total_steps": 100}
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_lr": "big"}, TypeError, "max_lr must be a number above 0, got 'big' of type str"),
    ({"max_lr": -0.1}, ValueError, "max_lr must be a number above 0, got -0.1"),
    ({"max_lr": math.nan}, ValueError, "max_lr"),
    ({"max_lr": [0.1]}, ValueError, "max_lr must be .* one per parameter group, got 1 for 2 groups"),
    ({"max_lr": [0.1, math.inf]}, ValueError, r"max_lr\[1\] must be"),
    ({"total_steps": None}, ValueError, "total_steps must be given, or epochs and steps_per_epoch"),
    ({"total_steps": 0}, ValueError, "total_steps must be an integer of at least 1, got 0"),
    ({"total_steps": 10.5}, TypeError, "total_steps must be an integer"),
    ({"epochs": 3, "steps_per_epoch": 5}, ValueError, "total_steps must not be given together with epochs"),
    ({"total_steps": None, "epochs": -3, "steps_per_epoch": 5}, ValueError, "epochs must be"),
    ({"total_steps": None, "epochs": 3, "steps_per_epoch": 0}, ValueError, "steps_per_epoch must be"),
    ({"pct_start": 1.0}, ValueError, r"pct_start must be a number in \[0, 1\), got 1.0"),
    ({"pct_start": 0.01}, ValueError, "pct_start must not make a phase of the schedule empty"),
    ({"pct_start": "half"}, TypeError, "pct_start"),
    ({"anneal_strategy": "cosine"}, ValueError, "anneal_strategy must be one of 'cos', 'linear'"),
    ({"cycle_momentum": 1}, TypeError, "cycle_momentum must be True or False"),
    ({"base_momentum": 0.99}, ValueError, "base_momentum must be at most max_momentum=0.95, got 0.99"),
    ({"max_momentum": 1.0}, ValueError, "max_momentum must be"),
    ({"div_factor": 0.0}, ValueError, "div_factor must be a number above 0"),
    ({"final_div_factor": math.inf}, ValueError, "final_div_factor"),
    ({"three_phase": "yes"}, TypeError, "three_phase"),
    ({"last_epoch": -2}, ValueError, "last_epoch must be an integer of at least -1"),
    ({"ensemble_lr_spread_ratio": 1.0}, ValueError, r"ensemble_lr_spread_ratio must be a number in \[0, 1\)"),
    ({"ensemble_lr_spread_ratio": -0.1}, ValueError, "ensemble_lr_spread_ratio"),
    ({"ensemble_lr_spread_ratio": None}, TypeError, "ensemble_lr_spread_ratio"),
    ({"model_sync_interval": 0}, ValueError, "model_sync_interval must be an integer of at least 1, got 0"),
    ({"model_sync_interval": 2.0}, TypeError, "model_sync_interval"),
    ({"auto_lr_warmup_steps": -5}, ValueError, "auto_lr_warmup_steps"),
    ({"enable_auto_lr": "on"}, TypeError, "enable_auto_lr must be True or False"),
    ({"loss_scale": 0.0}, ValueError, "loss_scale must be a number above 0"),
    ({"lr_of_lr": -1.0}, ValueError, "lr_of_lr"),
    ({"momentum_of_lr": 1.0}, ValueError, "momentum_of_lr"),
    ({"rank": -1}, ValueError, "rank"),
    ({"rank": 1}, ValueError, "rank must be below world_size=1, got 1"),
    ({"world_size": 0}, ValueError, "world_size"),
    ({"replicas": "world"}, ValueError, "replicas must be None while torch.distributed is not running"),
    ({"model": "net"}, TypeError, "model must be a torch.nn.Module or None"),
    ({"seed": -1}, ValueError, "seed must be an integer of at least 0"),
    (
        {"end": "fast"},
        ValueError,
        "end must be one of 'floor', 'final_fraction', 'final_div_factor' or a number above 0, got 'fast'",
    ),
    ({"end": 0.0}, ValueError, "end"),
    ({"loss_scale": -1.0}, ValueError, "loss_scale must be a number above 0, got -1.0"),
    ({"loss_scale": "warm"}, ValueError, "loss_scale must be one of 'auto'"),
    ({"records": "file"}, TypeError, r"records must have a write\(record\) method"),
]


@pytest.mark.parametrize(("bad", "error", "words"), BAD, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_bad_input_is_named_and_changes_nothing(bad: dict, error: type[Exception], words: str) -> None:
    optimizer = _optimizer(2)
    before = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    with pytest.raises(error, match=words):
        hdet.OneCycleAutoLR(optimizer, **{**GOOD, **bad})
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == before


def test_bad_optimizers() -> None:
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got 'sgd'"):
        hdet.OneCycleAutoLR("sgd", **GOOD)  # pyright: ignore[reportArgumentType]
    empty = torch.optim.SGD([{"params": []}, {"params": []}], lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="optimizer must have parameters, got none"):
        hdet.OneCycleAutoLR(empty, **GOOD)
    assert "max_lr" not in empty.param_groups[0]
    no_momentum = torch.optim.Adagrad([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match="pass cycle_momentum=False"):
        hdet.OneCycleAutoLR(no_momentum, **GOOD)


def test_the_late_default_start_is_fine_while_the_controller_is_off() -> None:
    hdet.OneCycleAutoLR(_optimizer(), 0.1, 10)


@pytest.mark.parametrize("late", [{}, {"auto_lr_warmup_steps": 0, "model_sync_interval": 100}])
def test_a_controller_that_would_start_after_the_end_is_off_and_told(late: dict) -> None:
    optimizer, plain = _optimizer(), _optimizer()
    with pytest.warns(hdet.HdetWarning, match="no round of 100 steps, so it is off: lower them"):
        scheduler = hdet.OneCycleAutoLR(optimizer, 0.1, 100, enable_auto_lr=True, **late)
    expected = OneCycleLR(plain, 0.1, 100)
    for _ in range(100):
        assert scheduler.get_last_lr() == expected.get_last_lr()
        optimizer.step()
        scheduler.step(1.0)
        plain.step()
        expected.step()


@pytest.mark.filterwarnings("ignore:the controller has nothing to compare")
@pytest.mark.parametrize(
    ("end", "share"), [(0.22, 0.22), ("final_fraction", 1e-4 / 25), ("final_div_factor", 1e4 / 25)]
)
def test_the_base_ends_at_its_share_of_where_the_controller_starts(end: Any, share: float) -> None:
    optimizer = _optimizer()
    warns = pytest.warns(hdet.HdetWarning, match="'final_div_factor' raises the learning rate 400-fold")
    with warns if share > 1 else contextlib.nullcontext():
        scheduler = hdet.OneCycleAutoLR(
            optimizer, 0.1, 100, enable_auto_lr=True, auto_lr_warmup_steps=30, model_sync_interval=10, end=end
        )
    rates = []
    for _ in range(100):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step(1.0)
    assert rates[-1] == pytest.approx(share * rates[29], rel=1e-12)


@pytest.mark.filterwarnings("ignore:the controller has nothing to compare")
def test_equation_8_with_a_final_fraction_is_floor_matching_from_the_peak() -> None:
    schedules = [
        hdet.OneCycleAutoLR(
            _optimizer(),
            0.1,
            100,
            enable_auto_lr=True,
            auto_lr_warmup_steps=30,
            model_sync_interval=10,
            end=end,
        )
        for end in ("floor", "final_fraction")
    ]
    for _ in range(100):
        for one in schedules:
            one.optimizer.step()
            one.step(1.0)
        assert schedules[0].get_last_lr() == pytest.approx(schedules[1].get_last_lr(), rel=1e-13)


@pytest.mark.parametrize(("start", "is_told"), [(0, True), (20, True), (30, False), (50, False)])
def test_a_controller_that_takes_over_inside_the_warm_up_is_told(start: int, is_told: bool):
    optimizer = _optimizer()
    settings = {"max_lr": 0.1, "total_steps": 100, "model_sync_interval": 5, "enable_auto_lr": True}
    with pytest.warns(hdet.HdetWarning) as told:
        hdet.OneCycleAutoLR(optimizer, auto_lr_warmup_steps=start, ensemble_lr_spread_ratio=0.1, **settings)
    texts = [
        str(one.message) for one in told if "never reached: pass auto_lr_warmup_steps=30" in str(one.message)
    ]
    assert len(texts) == is_told


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copied_scheduler_goes_on_as_the_original_does(duplicate):
    model, optimizer = linear()
    scheduler = hdet.OneCycleAutoLR(optimizer, max_lr=0.1, total_steps=40, model=model)
    train_linear(model, optimizer, scheduler, 13)
    again = duplicate(scheduler)
    assert isinstance(again, OneCycleLR) and again is not scheduler
    assert again.optimizer.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]
    copied = again.ensemble.optimizer
    assert copied is again.optimizer is not optimizer
    twin = nn.Linear(3, 1)
    twin.weight, twin.bias = copied.param_groups[0]["params"]
    assert train_linear(twin, copied, again, 27) == train_linear(model, optimizer, scheduler, 27)
    assert torch.equal(twin.weight, model.weight) and math.isfinite(twin.bias.item())

"""A state that does not fit is refused, and the ensemble is as before."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR

import hdet
from tests.helpers.models import linear, train_linear


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def build(
    controller="guard", *, is_virtual=False, num_groups=2, scheduler=OneCycleLR, optimizer=None, tail=0.5
):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    if num_groups == 1:
        groups = [{"params": list(model.parameters())}]
    made = (optimizer or torch.optim.AdamW)(groups, lr=0.01)
    plans = {
        OneCycleLR: lambda: OneCycleLR(made, max_lr=0.01, total_steps=20),
        LambdaLR: lambda: LambdaLR(made, lambda step: 1.0),
        StepLR: lambda: StepLR(made, 5),
        CosineAnnealingLR: lambda: CosineAnnealingLR(made, 20),
    }
    controllers = {
        "guard": [hdet.Guard()],
        "log": [hdet.Controller()],
        "paper": [hdet.Controller(form="paper")],
        "none": [],
    }
    settings = {
        "scheduler": plans[scheduler](),
        "explore": [hdet.LearningRate(0.1, per_group=False)],
        "sync_every": 4,
        "controllers": controllers[controller],
        "total_steps": 20,
        "average_tail": tail,
    }
    if is_virtual:
        return hdet.VirtualEnsemble(model, made, loss_of, num_replicas=2, **settings)
    return hdet.Ensemble(made, model=model, **settings)


def train(ensemble, num_steps=15):
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        x = torch.randn(4, 3, generator=generator)
        if isinstance(ensemble, hdet.VirtualEnsemble):
            ensemble.step(x)
        else:
            ensemble.optimizer.step()
            ensemble.step(1.0)
    ensemble.converge()
    return ensemble


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


def everything(ensemble):
    engine = ensemble.engine if isinstance(ensemble, hdet.VirtualEnsemble) else ensemble
    groups = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    return copy.deepcopy((ensemble.state_dict(), groups, engine.multipliers, engine.num_steps))


def changed(path, value):
    """The state with one entry changed; ``...`` takes it out."""

    def change(state):
        *inner, last = path
        for key in inner:
            state = state[key]
        if value is ...:
            del state[last]
        else:
            state[last] = value

    return change


BAD = [
    (changed(["version"], 3), "must be of version 6, got version 3"),
    (changed(["peaks"], ...), "it has no peaks"),
    (changed(["num_steps"], -3), "state_dict num_steps must be an integer of at least 0, got -3"),
    (changed(["num_steps"], "7"), "state_dict num_steps must be an integer .* got '7'"),
    (changed(["peaks"], [[0.1]]), "state_dict peaks must hold 2 numbers, got 1"),
    (changed(["peaks"], []), "state_dict peaks must hold 1 lists, got 0"),
    (changed(["peaks"], [[0.1, "a"]]), "state_dict peaks must be a number, got 'a'"),
    (changed(["tunables", "lr", "scheduled"], [0.1]), "state_dict lr scheduled must hold 2 numbers, got 1"),
    (changed(["tunables", "lr", "held"], [0.1]), "state_dict lr held must hold 2 numbers, got 1"),
    (changed(["tunables", "lr", "factors"], [["guard", 0.0]]), "lr factors must be a number above 0, got"),
    (changed(["tunables", "lr", "factors"], [1.0]), "state_dict lr factors must be a list of names"),
    (changed(["tunables", "lr", "share"], 2.0), "state_dict lr share must be a number in"),
    (changed(["tunables", "lr", "share"], ...), "state_dict lr must hold .* it has no share"),
    (changed(["tunables"], {}), r"must hold the hyperparameters \['lr'\], got \[\]"),
    (changed(["tunables"], None), "state_dict tunables must be a dictionary, got None"),
    (changed(["losses"], 3), "state_dict losses must be a list, got 3"),
    (changed(["losses"], [[1.0]]), "state_dict losses must hold 3 numbers, got 1"),
    (changed(["optimizer_steps_are_seen"], 1), "optimizer_steps_are_seen must be True or False, got 1"),
    (changed(["scheduler"], {"a": 1}), "must be a state of OneCycleLR, but it has a and lacks base_lrs"),
    (changed(["scheduler", "base_lrs"], [0.1]), "it has 1 base_lrs and not 2"),
    (changed(["scheduler"], 5), "state_dict scheduler must be a state of OneCycleLR, but it is 5"),
    (changed(["controllers"], []), "state_dict controllers must be a dictionary"),
    (changed(["controllers", "comparing"], {}), r"with the controllers \['guard'\], got .*'comparing'"),
    (changed(["controllers", "guard"], {}), "state_dict guard must hold memory, num_brakes, expected_loss"),
    (changed(["controllers", "guard", "memory"], [1.0]), "guard memory must hold 7 numbers, got 1"),
    (changed(["controllers", "guard", "num_brakes"], -1), "num_brakes must be an integer of at least 0"),
    (changed(["tail", "mean"], []), "state_dict tail mean must hold 2 tensors, got 0"),
    (changed(["tail", "mean", 0], torch.zeros(9, 9)), r"tail mean must have shape .* at 0, got \(9, 9\)"),
    (changed(["tail", "mean", 0], 1), "state_dict tail mean must hold tensors, got int"),
    (changed(["tail", "num_taken"], -1), "state_dict tail num_taken must be an integer of at least 0"),
    (changed(["tail"], []), "state_dict tail must be a dictionary"),
]  # fmt: skip


@pytest.mark.parametrize("is_virtual", [False, True], ids=["ranks", "virtual"])
@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_a_state_that_does_not_fit_is_refused_whole(change, message, is_virtual):
    saved = copy.deepcopy(train(build(is_virtual=is_virtual)).state_dict())
    change(saved["engine"] if is_virtual else saved)
    other = train(build(is_virtual=is_virtual), 9)
    before = everything(other)
    with pytest.raises((ValueError, TypeError), match=message):
        other.load_state_dict(saved)
    assert same(everything(other), before)


VIRTUAL = [
    (changed(["engine"], ...), "it has no engine"),
    (changed(["engine"], {}), "it has no version, num_steps, peaks"),
    (changed(["model", "bias"], ...), "state_dict model must hold weight, bias, but it has no bias"),
    (changed(["model", "extra"], torch.zeros(1)), "must be of this model, which has no extra"),
    (changed(["model", "bias"], torch.zeros(5)), r"model bias must have shape \(2,\) at 0, got \(5,\)"),
    (changed(["model", "bias"], 1.0), "model bias must hold tensors, got float"),
    (changed(["param_groups"], []), "param_groups must hold 2 parameter groups, got 0"),
    (changed(["param_groups", 0], {"lr": 0.1}), "state_dict param_groups must hold lr, betas"),
    (changed(["row_optimizer", "num_updates"], -1), "num_updates must be an integer of at least 0"),
    (changed(["row_optimizer", "moments"], []), "moments must hold 2 parameter groups"),
    (changed(["row_optimizer", "moments", 0, "exp_avg"], torch.zeros(2, 1)), "exp_avg must have shape"),
    (changed(["row_optimizer", "moments", 0], {"momentum_buffer": 1}), "moments must be those of AdamW"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), VIRTUAL, ids=[message for _, message in VIRTUAL])
def test_a_virtual_state_that_does_not_fit_is_refused_whole(change, message):
    saved = copy.deepcopy(train(build(is_virtual=True)).state_dict())
    change(saved)
    other = train(build(is_virtual=True), 9)
    before = everything(other)
    with pytest.raises((ValueError, TypeError), match=message):
        other.load_state_dict(saved)
    assert same(everything(other), before)


@pytest.mark.parametrize("is_virtual", [False, True], ids=["ranks", "virtual"])
def test_an_empty_state_names_what_is_missing(is_virtual):
    names = "engine, model, param_groups, row_optimizer" if is_virtual else "version, num_steps, peaks"
    with pytest.raises(ValueError, match=f"state_dict must hold .* it has no {names}"):
        build(is_virtual=is_virtual).load_state_dict({})
    with pytest.raises(TypeError, match="got None of type NoneType"):
        build(is_virtual=is_virtual).load_state_dict(None)


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        ("log", "paper", "comparing form must be 'paper', got 'log': build the ensemble"),
        ("guard", "none", r"of a run with the controllers \[\], got one that has \['guard'\], too"),
        ("paper", "guard", r"with the controllers \['guard'\], got one that has \['comparing'\], too"),
    ],
)
def test_another_controller_is_refused(saved, here, message):
    state = train(build(saved)).state_dict()
    other = build(here)
    before = everything(other)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    assert same(everything(other), before)


@pytest.mark.parametrize("here", ["guard", "log", "paper"])
def test_any_controller_takes_over_from_none(here):
    other = build(here)
    other.load_state_dict(train(build("none")).state_dict())
    assert other.num_steps == 15
    train(other, 5)


@pytest.mark.parametrize("here", [LambdaLR, StepLR, CosineAnnealingLR])
@pytest.mark.parametrize("saved", [OneCycleLR, LambdaLR, StepLR])
def test_another_scheduler_is_refused(saved, here):
    state = train(build(scheduler=saved)).state_dict()
    other = build(scheduler=here)
    before = everything(other)
    if saved is here:
        other.load_state_dict(state)
        assert other.num_steps == 15
        return
    with pytest.raises(ValueError, match=f"scheduler must be a state of {here.__name__}, but it has"):
        other.load_state_dict(state)
    assert same(everything(other), before)


class Schedule:
    """A user's own."""

    def __init__(self):
        self.rate = 1.0

    def step(self):
        pass

    def state_dict(self):
        return {"rate": self.rate}

    def load_state_dict(self, state):
        self.extra = 1
        self.rate = state["rate"]


def test_a_schedule_that_raises_in_the_middle_is_put_back():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    schedule = Schedule()
    ensemble = hdet.Ensemble(optimizer, scheduler=schedule, sync_every=5)
    state = ensemble.state_dict() | {"scheduler": {"speed": 1}}
    with pytest.raises(
        ValueError, match=r"a state of Schedule, but it cannot be loaded \(KeyError: 'rate'\)"
    ):
        ensemble.load_state_dict(state)
    assert schedule.rate == 1.0


def test_sgd_does_not_take_the_moments_of_adam():
    state = train(build(is_virtual=True)).state_dict()
    other = train(build(is_virtual=True, optimizer=torch.optim.SGD), 5)
    before = everything(other)
    with pytest.raises(
        ValueError, match=r"moments must be those of SGD, \['momentum_buffer'\], got \['exp_avg'"
    ):
        other.load_state_dict(state)
    assert same(everything(other), before)
    with pytest.raises(ValueError, match="state_dict lr scheduled must hold 1 numbers, got 2"):
        build(is_virtual=True, num_groups=1).load_state_dict(state)


def test_a_drop_in_scheduler_is_as_before_too():
    def make():
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        return optimizer, hdet.OneCycleAutoLR(optimizer, max_lr=0.1, total_steps=20, model_sync_interval=5)

    optimizer, scheduler = make()
    for _ in range(6):
        optimizer.step()
        scheduler.step(1.0)
    state = scheduler.state_dict()
    state["ensemble"]["num_steps"] = -3
    _, other = make()
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="num_steps must be an integer of at least 0, got -3"):
        other.load_state_dict(state)
    assert other.state_dict() == before


def train_and_save(model, optimizer) -> dict:
    auto = hdet.AutoLR(optimizer, total_steps=100, model=model, sync_every=5)
    train_linear(model, optimizer, auto, 10)
    auto.converge()
    return auto.state_dict()


def test_a_state_of_another_model_is_refused_before_anything_changes():
    model, optimizer = linear()
    state = train_and_save(model, optimizer)
    other = nn.Linear(4, 1)
    auto = hdet.AutoLR(torch.optim.AdamW(other.parameters(), lr=0.1), total_steps=100, model=other)
    with pytest.raises(ValueError, match="a run that trains 5 parameters, got one of 4: build the model"):
        auto.load_state_dict(state)
    assert auto.num_steps == 0


def test_a_state_of_other_rounds_is_told(caplog: pytest.LogCaptureFixture):
    state = train_and_save(*linear())
    model, optimizer = linear()
    auto = hdet.AutoLR(optimizer, total_steps=100, model=model, sync_every=7)
    with caplog.at_level(logging.WARNING):
        auto.load_state_dict(state)
    assert "rounds of 5 steps, and these have 7" in caplog.text


def test_a_state_without_these_entries_still_loads():
    state = train_and_save(*linear())
    old = {
        name: value for name, value in state.items() if name not in ("sync_every", "num_elements", "found")
    }
    model, optimizer = linear()
    auto = hdet.AutoLR(optimizer, total_steps=100, model=model)
    auto.load_state_dict(old)
    assert auto.num_steps == 10

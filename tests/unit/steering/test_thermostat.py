"""The thermostat beside the guard and the weight decay, and where it cannot work."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from benchmarks.memory_meter import MemoryMeter
from hdet.lab.plan import memory_cost
from hdet.method.thermostat import FOUND, GUESS, LAST, Round, ThermostatState
from hdet.steering.thermostat import ThermostatSteering
from tests.helpers.models import Net, batch

HELD_OUT = [batch(k, 0, seed=5) for k in range(32)]


def loss_of(model: nn.Module, data: Any) -> torch.Tensor:
    return (model(data[0]) - data[1]).square().mean()


def auto_of(lr: float = 0.01, model: nn.Module | None = None, **told: Any) -> hdet.AutoLR:
    model = Net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    settings = {
        "controllers": [hdet.Thermostat()],
        "probe": hdet.Probe(HELD_OUT, loss_of),
        "total_steps": 400,
    }
    return hdet.AutoLR(optimizer, model=model, **settings | told)


def train(auto: hdet.AutoLR, end: int = 400, *, loss: Any = None) -> None:
    model = auto.replicas.model
    while auto.num_steps < end:
        both = zip(*(batch(r, auto.num_steps) for r in range(2)), strict=True)
        seen = loss_of(model, tuple(map(torch.cat, both)))
        auto.optimizer.zero_grad()
        seen.backward()
        auto.optimizer.step()
        auto.step(seen if loss is None else loss(auto.num_steps))


def part_of(auto: hdet.AutoLR) -> ThermostatSteering:
    return next(part for part in auto.controllers if isinstance(part, ThermostatSteering))


def always(step: float):
    def steered(state: ThermostatState, seen: Round, told: hdet.Thermostat) -> ThermostatState:
        return state._replace(rounds=(*state.rounds, seen), log_factor=state.log_factor + step)

    return steered


def test_a_probe_is_needed():
    with pytest.raises(ValueError, match=r"probe must be an hdet\.Probe for a Thermostat.* Pass probe=hdet"):
        auto_of(probe=None)
    with pytest.raises(TypeError, match=r"probe must be an hdet\.Probe or None, got <function"):
        auto_of(probe=lambda: 1.0)


def test_rounds_of_replicas_that_differ_end_at_syncs_so_these_must_be_frequent():
    with pytest.raises(ValueError, match=r"sync_every must be at most 10 for a Thermostat .* got 11: its"):
        auto_of(spread=0.1, sync_every=11)
    auto_of(spread=0.1, sync_every=10)
    auto_of(sync_every=400)


def test_gradients_must_be_shared_and_one_controller_moves_the_learning_rate():
    with pytest.raises(ValueError, match=r"gradients must be 'shared' for a Thermostat, got 'local'.* Leave"):
        hdet.VirtualEnsemble(
            net := Net(),
            torch.optim.AdamW(net.parameters()),
            loss_of,
            num_replicas=2,
            gradients="local",
            total_steps=400,
            controllers=[hdet.Thermostat()],
        )
    net = Net()
    with pytest.raises(ValueError, match=r"both .*got \['lr'\] to be moved by both: leave one out"):
        hdet.Ensemble(
            torch.optim.AdamW(net.parameters()),
            model=net,
            controllers=[hdet.Controller(start=10), hdet.Thermostat()],
            total_steps=400,
            sync_every=10,
            probe=hdet.Probe(HELD_OUT, loss_of),
        )


def test_a_run_that_is_too_short_is_told_and_not_moved():
    with pytest.warns(hdet.NoEffectWarning, match=r"total_steps=199 leaves rounds of fewer than 5 steps"):
        auto = auto_of(total_steps=199)
    train(auto, 199)
    assert auto.found_lr == {"lr": 0.01} and part_of(auto)._mean is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auto_of(total_steps=200)


@pytest.mark.filterwarnings("ignore:no loss was given")
def test_a_run_without_losses_is_told_and_not_moved():
    auto = auto_of(1e-4)
    with pytest.warns(hdet.HdetWarning, match=r"no loss was given to step\(\), so the thermostat"):
        for _ in range(150):
            auto.optimizer.step()
            auto.step()
    assert auto.found_lr == {"lr": 1e-4}


def test_the_prior_is_that_of_the_answer_and_stays_after_a_resume():
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    batches = [batch(0, k) for k in range(40)]
    found = hdet.find_lr(net, optimizer, batches, loss_of, total_steps=400)
    auto = auto_of(model=net, found=found)
    again = auto_of()
    assert part_of(auto).settings.priors == FOUND and part_of(again).settings.priors == GUESS
    train(auto, 60)
    again.load_state_dict(auto.state_dict())
    assert part_of(again).settings.priors == FOUND
    own = ((1.0, 0.0, 1.0),)
    assert part_of(auto_of(controllers=[hdet.Thermostat(priors=own)])).settings.priors == own


def test_the_guard_divides_what_the_thermostat_has_come_to(monkeypatch, caplog):
    monkeypatch.setattr("hdet.method.thermostat.steered", always(0.1))
    auto = auto_of()
    train(auto, 75, loss=lambda step: 4.0 - 0.04 * step)
    assert auto.found_lr["lr"] == pytest.approx(0.01 * math.exp(0.7))
    train(auto, 90, loss=lambda _: 9.0)
    assert "the learning rate is divided by 3" in caplog.text
    factor = math.exp(0.1 * len(part_of(auto)._state.rounds))
    assert auto.found_lr["lr"] == pytest.approx(0.01 * factor / 3) and 2.0 <= factor < 3.0
    assert part_of(auto)._mean is None
    assert auto.summary().endswith("rounds, off") and f"thermostat: x{factor:.3g}" in auto.summary()
    state = auto.state_dict()
    again = auto_of()
    again.load_state_dict(state)
    assert again.found_lr == auto.found_lr and part_of(again)._mean is None


def test_it_works_beside_the_weight_decay():
    records = hdet.Records()
    auto = auto_of(1e-4, controllers=[hdet.Thermostat(), hdet.HeldOutWeightDecay()], records=records)
    assert [part.name for part in auto.controllers] == ["guard", "weight_decay", "thermostat"]
    train(auto)
    assert auto.found_lr["lr"] > 1.5e-4 and any("weight_decay" in record.controllers for record in records)
    assert sum(len(record.controllers["thermostat"].factors) for record in records) == LAST
    last = [record for record in records if record.controllers["thermostat"].factors][-1]
    assert last.correction["lr"] == pytest.approx(last.controllers["thermostat"].factors[-1])


def test_a_run_of_another_kind_or_length_goes_on_without_it():
    plain = auto_of(controllers=[], probe=None)
    train(plain, 60)
    auto = auto_of()
    auto.load_state_dict(plain.state_dict())
    assert part_of(auto)._mean is None
    train(auto, 150)
    assert auto.found_lr == {"lr": 0.01}
    long, short = auto_of(total_steps=800), auto_of()
    train(short, 60)
    long.load_state_dict(short.state_dict())
    assert part_of(long)._mean is None


def test_a_broken_state_is_refused():
    auto = auto_of()
    train(auto, 25)
    state = auto.state_dict()
    state["controllers"]["thermostat"]["rounds"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="rounds must have shape"):
        auto_of().load_state_dict(state)


def test_it_is_off_by_default():
    records = hdet.Records()
    auto = auto_of(controllers=[], probe=None, records=records)
    train(auto, 150)
    assert [part.name for part in auto.controllers] == ["guard"]
    assert not any("thermostat" in r.controllers for r in records)


def test_while_a_probe_is_scored_the_weights_and_their_mean_change_places():
    data = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    with MemoryMeter() as meter:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        probe = hdet.Probe([data, data], lambda model, x: model(x).square().mean())
        told = {"controllers": [hdet.Thermostat()], "probe": probe}
        auto = hdet.AutoLR(optimizer, total_steps=200, model=model, **told)
        for _ in range(30):
            loss = model(data).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            auto.step(loss)
    assert "after 6 of" in auto.summary()
    cost = memory_cost(sum(p.numel() for p in model.parameters()), 1, num_moments=0)
    assert cost.thermostat == cost.tail == cost.parameters
    assert meter.peak_bytes <= 1.1 * (cost.peak + cost.thermostat)  # the largest tensor is copied
    assert meter.peak_bytes > 0.9 * (cost.peak + cost.thermostat)

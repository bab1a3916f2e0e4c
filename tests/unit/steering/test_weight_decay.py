"""What cannot be explored is refused before anything changes, with the remedy."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import hdet
from tests.helpers.models import linear


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 1).square().mean()


def probe_of(size: int = 200) -> hdet.Probe:
    return hdet.Probe(torch.randn(size, 3).split(50), loss_of)


def auto_of(optimizer: torch.optim.Optimizer, model: nn.Module | None, **told) -> hdet.AutoLR:
    settings = {
        "total_steps": 100,
        "model": model,
        "controllers": [hdet.HeldOutWeightDecay()],
        "probe": probe_of(),
    }
    return hdet.AutoLR(optimizer, **settings | told)


def test_a_probe_is_needed_and_a_bare_function_is_not_enough():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.raises(
        ValueError, match=r"probe must be an hdet\.Probe for a HeldOutWeightDecay, got None: only"
    ):
        auto_of(optimizer, model, probe=None)
    with pytest.raises(
        TypeError, match=r"probe must be an hdet\.Probe or None, got .*function.*: write hdet"
    ):
        auto_of(optimizer, model, probe=lambda: 1.0)
    assert optimizer.param_groups[0]["lr"] == 0.01
    with pytest.raises(ValueError, match=r"model must be given with a probe, got None"):
        auto_of(optimizer, None)
    auto_of(optimizer, model).close()  # nothing is claimed by what failed


def test_an_adaptive_optimizer_with_coupled_decay_is_refused():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    with pytest.raises(ValueError, match=r"got Adam, which adds it to the gradient .* use AdamW"):
        auto_of(optimizer, model)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_nothing_that_decays_is_warned_of():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    with pytest.warns(hdet.NoEffectWarning, match="WeightDecay found no 'weight_decay' above zero"):
        auto = auto_of(optimizer, model)
    for _ in range(100):
        optimizer.step()
        auto.step(0.5)
    assert optimizer.param_groups[0]["weight_decay"] == 0.0


def test_a_loss_below_zero_moves_nothing_and_is_told():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1.0)
    probe = hdet.Probe(torch.randn(200, 3).split(50), lambda model, x: loss_of(model, x) - 100)
    auto = auto_of(optimizer, model, probe=probe)
    with pytest.warns(hdet.HdetWarning, match="the loss is below zero at step 20, so nobody can tell"):
        for _ in range(100):
            optimizer.step()
            auto.step(-99.0)
    assert optimizer.param_groups[0]["weight_decay"] == 1.0


@pytest.mark.parametrize(("kind", "repeats"), [("adamw", 1.0), ("sgd", 10.0)])
def test_a_start_by_learning_rate_and_steps(kind: str, repeats: float):
    model = nn.Linear(3, 1)
    groups = [
        {"params": [model.weight], "weight_decay": 0.7},
        {"params": [model.bias], "weight_decay": 0.0},
    ]
    if kind == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=0.01)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    auto = auto_of(optimizer, model, controllers=[hdet.HeldOutWeightDecay(start="auto")])
    assert auto.base["weight_decay"] == pytest.approx(5 / (0.01 * 100 * repeats))
    assert optimizer.param_groups[1]["weight_decay"] == 0.0


def test_the_length_of_the_run_is_needed():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.raises(ValueError, match="total_steps must be given for a HeldOutWeightDecay, got None: it"):
        hdet.Ensemble(optimizer, model=model, controllers=[hdet.HeldOutWeightDecay()], probe=probe_of())


def test_a_small_probe_is_warned_of_and_an_empty_one_refused():
    model, probe = nn.Linear(3, 1), probe_of(50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.warns(hdet.HdetWarning, match="the probe has 50 examples, and with fewer than 200"):
        auto_of(optimizer, model, probe=probe)
    assert probe.num_examples == 50
    with pytest.raises(ValueError, match="batches must hold at least one example, got none"):
        hdet.Probe([], loss_of)
    with pytest.raises(TypeError, match=r"of type Tensor and shape \(200, 3\): write hdet\.Probe"):
        hdet.Probe(torch.randn(200, 3), loss_of)
    with pytest.raises(TypeError, match=r"loss must be a function loss\(model, batch\)"):
        hdet.Probe([torch.randn(200, 3)], 3)  # pyright: ignore[reportArgumentType]


def test_a_probe_draws_no_random_number_and_has_parts_of_all_examples():
    data = torch.utils.data.TensorDataset(torch.arange(300.0).unsqueeze(1))
    loader = torch.utils.data.DataLoader(data, batch_size=100)
    state = torch.get_rng_state()
    probe = hdet.Probe(loader, lambda model, batch: model(batch[0]).mean())
    assert torch.equal(torch.get_rng_state(), state)
    losses = probe(nn.Identity())
    assert len(losses) == 9
    assert losses.mean().item() == pytest.approx(149.5, abs=0.5)


def test_controllers_side_by_side_are_of_different_kinds():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.raises(ValueError, match="controllers must name each kind once"):
        hdet.Ensemble(optimizer, total_steps=10, controllers=[hdet.Guard(), hdet.Guard()])
    with pytest.raises(
        TypeError, match=r"hold controllers, got 'guard' .*: write \[hdet\.Controller\(\), hdet"
    ):
        hdet.Ensemble(optimizer, total_steps=10, controllers=["guard"])  # pyright: ignore[reportArgumentType]


def test_a_checkpoint_without_exploration_goes_on_with_it_and_back(caplog):
    model = nn.Linear(3, 1)

    def run_of(*, explores: bool) -> hdet.AutoLR:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        told = {} if explores else {"controllers": [], "probe": None}
        return auto_of(optimizer, model, **told)

    plain, exploring = run_of(explores=False), run_of(explores=True)
    with pytest.raises(ValueError, match="state_dict must hold the hyperparameters"):
        exploring.load_state_dict(plain.state_dict())  # what is explored must be the same, as everywhere
    assert set(exploring.state_dict()["controllers"]) == {"guard", "weight_decay"}
    exploring.controllers.check_state(plain.state_dict()["controllers"])
    with pytest.raises(
        ValueError, match=r"controllers \['guard'\], got one that has \['weight_decay'\], too"
    ):
        plain.controllers.check_state(exploring.state_dict()["controllers"])


def test_where_the_guard_goes_back_earlier_looks_are_forgotten(caplog):
    caplog.set_level(logging.WARNING)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    records = hdet.Records()
    auto = auto_of(optimizer, model, sync_every=5, records=records)
    for step in range(60):
        optimizer.zero_grad()
        loss_of(model, torch.randn(8, 3)).backward()
        optimizer.step()
        auto.step(1.0 - 0.015 * step if step < 40 else 5.0)
    assert "the loss has collapsed" in caplog.text or "lost all" in caplog.text
    went_back = next(r.step for r in records if r.controllers["guard"].num_brakes)
    looks = [r.step for r in records if "weight_decay" in r.controllers]
    assert looks
    assert went_back not in looks


@pytest.mark.parametrize(
    ("explores", "num_bad_rounds", "num_brakes"), [(False, 3, 1), (True, 3, 0), (True, 30, 1)]
)
def test_the_guard_waits_longer_where_decay_is_explored(explores: bool, num_bad_rounds: int, num_brakes: int):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    told = {} if explores else {"controllers": [], "probe": None}
    records = hdet.Records()
    auto = auto_of(optimizer, model, total_steps=300, sync_every=5, records=records, **told)
    for step in range(300):
        is_bad = 20 <= step // 5 < 20 + num_bad_rounds
        loss_of(model, torch.ones(4, 3)).backward()
        optimizer.step()
        auto.step(5.0 if is_bad else 5.0 * 0.95**step)
        if records and records[-1].controllers["guard"].num_brakes:
            break
    assert records[-1].controllers["guard"].num_brakes == num_brakes


def test_weights_that_are_frozen_are_left_out_of_a_look():
    slopes = []
    for freezes in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
        model[0].requires_grad_(False)
        trained = model.parameters() if freezes else model[2].parameters()
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        records = hdet.Records()
        x = torch.linspace(-1, 1, 600).view(200, 3)
        probe = hdet.Probe(x.split(50), loss_of)
        auto = auto_of(optimizer, model, probe=probe, records=records)
        for _ in range(100):
            loss = loss_of(model, x[:20])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            auto.step(loss)
        looks = [record.controllers.get("weight_decay") for record in records]
        slopes.append([look.slope for look in looks if look])
    assert len(slopes[0]) == 15
    assert slopes[0] == slopes[1]


# --- a weight decay that cannot move ------------------------------------------------------------------


def run(auto: hdet.AutoLR, optimizer: torch.optim.Optimizer, *losses: float, steps: int = 100) -> None:
    for _ in range(steps):
        optimizer.step()
        auto.step(*losses)


@pytest.mark.filterwarnings("ignore:no loss was given to step.., so the guard")
def test_a_run_without_losses_is_told_that_the_weight_decay_stays():
    model, optimizer = linear(0.01)
    auto = auto_of(optimizer, model)
    with pytest.warns(hdet.HdetWarning, match=r"the weight decay cannot be moved: call step\(loss\)") as told:
        run(auto, optimizer)
    assert sum("weight decay" in str(one.message) for one in told) == 1
    assert "weight_decay: 0.01, no look yet at held-out data" in auto.summary()


def test_a_held_out_loss_that_is_not_finite_is_told_once():
    model, optimizer = linear(0.01)
    spoilt = torch.randn(200, 3)
    spoilt[150] = torch.nan
    auto = auto_of(optimizer, model, probe=hdet.Probe([spoilt], loss_of))
    with pytest.warns(hdet.HdetWarning) as told:
        run(auto, optimizer, 0.5)
    assert [str(one.message).partition(",")[0] for one in told] == [
        "the loss on the probe is not finite at step 20"
    ]


def test_the_summary_tells_of_a_weight_decay_that_was_kept():
    model, optimizer = linear(0.01)
    auto = auto_of(
        optimizer, model, probe=hdet.Probe([torch.randn(200, 3)], lambda m, x: loss_of(m, x) * 0 + 1)
    )
    run(auto, optimizer, 0.5)
    assert auto.summary().endswith("\nweight_decay: 0.01, kept in 15 looks at held-out data")


def test_frozen_weights_and_too_short_runs_are_warned_of():
    model, optimizer = linear(0.01)
    with pytest.warns(
        hdet.NoEffectWarning, match="total_steps=8 with sync_every=5 leaves 1. Pass sync_every=1"
    ):
        auto_of(optimizer, model, total_steps=8).close()
    model.requires_grad_(False)
    with pytest.warns(hdet.NoEffectWarning, match="found only parameters with requires_grad=False"):
        auto = auto_of(optimizer, model)
    run(auto, optimizer, 0.5)
    assert auto.base["weight_decay"] == 0.01


def test_a_probe_that_nothing_looks_at_is_warned_of():
    model, optimizer = linear(0.01)
    with pytest.warns(hdet.HdetWarning, match="the probe is not used, .* pass controllers=") as told:
        auto_of(optimizer, model, controllers=[])
    assert [warning.message.argument for warning in told] == ["probe"]  # pyright: ignore[reportAttributeAccessIssue]

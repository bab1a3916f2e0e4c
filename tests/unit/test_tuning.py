"""tune: what it chooses, what it leaves out and says, and that its runs go on in the same bits."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import hdet
from hdet.tuning import Tuned, take_statistics
from tests.helpers.replicas import run_replicas


def data_of(seed: int, size: int) -> TensorDataset:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sin().sum(dim=1, keepdim=True))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def net(*, with_norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(32)] if with_norm else []
    return nn.Sequential(nn.Linear(8, 32), *norm, nn.Tanh(), nn.Linear(32, 1))


def loader_of(size: int = 640) -> DataLoader[Any]:
    return DataLoader(data_of(0, size), batch_size=32, shuffle=True)


HELD_OUT = [data_of(1, 256)[:]]


def train(auto: Any, model: nn.Module, optimizer: Any, loader: Any, end: int) -> None:
    torch.manual_seed(auto.num_steps)  # the order of a run that is resumed here
    while auto.num_steps < end:
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            auto.step(loss)
            if auto.num_steps == end:
                return


def tuned(optimizer: Any = torch.optim.AdamW, *, loader: Any = None, **settings: Any) -> Tuned:
    model = net()
    given = {"total_steps": 400, "learning_rate": "keep", "held_out": HELD_OUT} | settings
    kind = optimizer if callable(optimizer) else torch.optim.AdamW
    return hdet.tune(
        model, kind(model.parameters(), lr=1e-3), loader_of() if loader is None else loader, loss_of, **given
    )


def kinds(auto: Tuned) -> set[str]:
    return {one.name for one in auto.controllers}


def test_one_call_trains_as_its_parts_do():
    model, loader = net(), loader_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    auto = hdet.tune(model, optimizer, loader, loss_of, total_steps=400, held_out=HELD_OUT)
    assert auto.found is not None and auto.notes == []
    assert kinds(auto) == {"guard", "thermostat", "weight_decay"}
    train(auto, model, optimizer, loader, 400)
    assert "step 400 of 400" in auto.summary() and "your guess was 0.0001" in auto.summary()

    parts, other = net(), torch.optim.AdamW
    again = other(parts.parameters(), lr=1e-4)
    probe = hdet.Probe(HELD_OUT, loss_of)
    found = hdet.find_lr(parts, again, loader, loss_of, total_steps=400, probe=probe)
    assert found == auto.found and found.lr[0] > 1e-3
    steering = {"controllers": [hdet.Thermostat(), hdet.HeldOutWeightDecay()], "probe": probe}
    by_hand = hdet.AutoLR(again, total_steps=400, model=parts, found=found, **steering)
    train(by_hand, parts, again, loader, 400)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), parts.parameters(), strict=True))


@pytest.mark.parametrize(
    "optimizer, settings, names, words",
    [
        (None, {"held_out": None}, {"thermostat"}, "as it is: there is no held-out data."),
        (None, {"held_out": [data_of(1, 99)[:]]}, {"thermostat"}, "99 held-out examples are too few"),
        (None, {"total_steps": 150}, {"weight_decay"}, "No thermostat: it needs a run of 200 steps"),
        (None, {"loader": loader_of(32 * 400)}, {"thermostat"}, "400 batches are enough for 400 steps"),
        (None, {"loader": (batch for batch in loader_of())}, {"thermostat"}, "batches has no len()"),
        (None, {"sync_every": 390}, {"thermostat"}, "sync_every=390 leave too few looks"),
        (torch.optim.Adam, {}, {"thermostat"}, "the optimizer has none, set weight_decay=0.01"),
        (
            lambda p, lr: torch.optim.Adam(p, lr=lr, weight_decay=0.1),
            {},
            {"thermostat"},
            "adds it to the gradient",
        ),
        (torch.optim.SGD, {}, {"thermostat", "weight_decay"}, "begins at 0.0005, because the optimizer had"),
        (torch.optim.RMSprop, {"held_out": None}, set(), "does not tell the learning rate of RMSprop"),
    ],
)
def test_what_cannot_work_is_left_out_and_said(optimizer, settings, names, words, caplog):
    with caplog.at_level(logging.INFO, "hdet"):
        auto = tuned(optimizer, **settings)
    assert kinds(auto) == names | {"guard"}
    assert words in auto.summary() and words in caplog.text


def test_controllers_that_are_given_are_those_that_there_are():
    with pytest.warns(hdet.HdetWarning, match="nothing to compare"):
        auto = tuned(controllers=[hdet.Controller()], spread=1 / 9)
    assert kinds(auto) == {"guard", "comparing"} and auto.notes == []
    assert kinds(tuned(controllers=[])) == {"guard"}


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"held_out": None, "controllers": [hdet.HeldOutWeightDecay()]}, "held_out must be given for a Held"),
        ({"held_out": 3}, "held_out must be an hdet.Probe, held-out batches"),
        ({"learning_rate": 0.1}, "learning_rate must be"),
        ({"controllers": [hdet.Thermostat()], "spread": 0.1, "sync_every": 50}, "sync_every must be at most"),
        ({"spread": 1.5}, "spread must be a number in"),
    ],
)
def test_what_cannot_be_combined_is_refused_before_the_search(settings, words):
    with pytest.raises((ValueError, TypeError), match=words):
        tuned(**({"learning_rate": "search", "loader": []} | settings))


@pytest.mark.parametrize("clip_norm, is_left_out", [(1e-3, True), (1e3, False)])
def test_no_thermostat_where_gradients_of_sgd_are_clipped_in_nearly_every_step(clip_norm, is_left_out):
    auto = tuned(torch.optim.SGD, learning_rate="search", clip_norm=clip_norm)
    assert auto.found is not None and auto.found.clipped == float(is_left_out)
    assert ("thermostat" in kinds(auto)) != is_left_out
    assert ("gradients are clipped in nearly every step" in auto.summary()) == is_left_out
    assert "thermostat" in kinds(tuned(learning_rate="search", clip_norm=clip_norm))  # Adam divides it out
    assert "gradients may be clipped" in tuned(torch.optim.SGD, clip_norm=clip_norm).summary()


def test_a_search_at_its_limits_is_made_again():
    model, loader = net(), loader_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-8)
    alone = hdet.find_lr(model, optimizer, loader, loss_of, total_steps=400)
    auto = hdet.tune(model, optimizer, loader, loss_of, total_steps=400)
    assert alone.should_search_again and auto.found is not None
    assert auto.found.asked == [1e-8] and auto.found.began_at == alone.lr
    assert auto.found.lr[0] > 10 * alone.lr[0] and auto.found.num_steps > alone.num_steps
    assert "a second search: " in auto.summary()
    assert optimizer.param_groups[0]["initial_lr"] == 2 * auto.found.lr[0]


def test_a_run_is_resumed_in_the_same_bits_without_a_search(tmp_path):
    def begun() -> Any:
        model = net(with_norm=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        settings = {"total_steps": 300, "held_out": HELD_OUT, "resume": tmp_path}
        return model, optimizer, hdet.tune(model, optimizer, loader_of(), loss_of, **settings)

    model, optimizer, auto = begun()
    train(auto, model, optimizer, loader_of(), 100)
    auto.converge()
    hdet.save_checkpoint(tmp_path, step=100, model=model, optimizer=optimizer, auto=auto)
    other_model, other, again = begun()
    assert again.num_steps == 100 and again.found == auto.found and again.notes == auto.notes
    for one in ((auto, model, optimizer), (again, other_model, other)):
        train(*one, loader_of(), 300)
    state, resumed = model.state_dict(), other_model.state_dict()
    assert all(torch.equal(state[name], resumed[name]) for name in state)
    assert state["1.num_batches_tracked"] == 20  # one epoch, after the last step


def test_batch_norm_has_the_statistics_of_the_last_weights():
    model, loader = net(with_norm=True), loader_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    auto = hdet.tune(model, optimizer, loader, loss_of, total_steps=200, learning_rate="keep")
    random = torch.get_rng_state()
    assert not take_statistics(net(), loader, loss_of)
    assert torch.equal(torch.get_rng_state(), random)
    train(auto, model, optimizer, loader, 200)
    x, _ = data_of(0, 640)[:]
    inner = model[0](x).detach()
    assert torch.allclose(model[1].running_mean, inner.mean(dim=0), atol=1e-5)
    assert model[1].momentum == 0.1 and model.training
    mean = model[1].running_mean.clone()
    auto.finish()  # once is enough
    assert torch.equal(model[1].running_mean, mean)


def test_an_iterator_that_has_ended_leaves_the_statistics():
    model = net(with_norm=True)
    before = model[1].running_var.clone()
    assert take_statistics(model, iter([]), loss_of) and torch.equal(model[1].running_var, before)


def _on_ranks(rank: int, spread: float) -> tuple[Any, ...]:
    bare = net(with_norm=True)
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(data_of(rank, 640 + 32 * rank), batch_size=32)  # one rank has a batch more
    given = {"total_steps": 200, "held_out": HELD_OUT, "spread": spread}
    auto = hdet.tune(model, optimizer, loader, loss_of, **given)
    before = float(optimizer.param_groups[0]["lr"])
    train(auto, model, optimizer, loader, 200)
    assert auto.found is not None
    return auto.found.lr, kinds(auto), before, {k: v.detach() for k, v in bare.state_dict().items()}


@pytest.mark.parametrize("spread", [0.0, 1 / 9])
def test_ranks_find_and_end_with_the_same(spread):
    (found, names, first, mine), (other, _, second, theirs) = run_replicas(_on_ranks, 2, spread)
    assert found == other and found[0] > 1e-3
    assert names == {"guard", "thermostat", "weight_decay"}
    assert (first == second) == (spread == 0)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items() if "tracked" not in name)


def _sharded(rank: int) -> tuple[Any, ...]:
    model = net(with_norm=True)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(data_of(rank, 640), batch_size=32)
    given = {"total_steps": 200, "held_out": HELD_OUT}
    with pytest.raises(ValueError, match="resume must be None for a sharded model"):
        hdet.tune(model, optimizer, loader, loss_of, resume="runs", **given)
    auto = hdet.tune(model, optimizer, loader, loss_of, **given)
    train(auto, model, optimizer, loader, 200)
    assert auto.found is not None
    return auto.found.lr, kinds(auto), auto.notes, loss_of(model, HELD_OUT[0]).item()


def test_a_sharded_model_takes_the_same_call():
    (found, names, notes, loss), (other, _, _, _) = run_replicas(_sharded, 2)
    assert found == other and found[0] > 1e-3 and loss < 1
    assert names == {"guard", "thermostat", "weight_decay"}
    assert notes == ["BatchNorm keeps the statistics of the last step, because the model is sharded."]

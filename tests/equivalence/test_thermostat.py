"""AutoLR with a thermostat equals the reference, on one device, on two ranks, and after a resume.

So does a run whose replicas differ, as ranks and as rows.
"""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.auto import settings_of
from hdet.method import reference
from hdet.method.recipe import Recipe
from hdet.method.thermostat import LAST
from hdet.method.watches import ThermostatWatch
from hdet.replicas.tail import Tail
from hdet.round_record import ThermostatRecord
from tests.helpers.models import Net, batch, predict
from tests.helpers.replicas import run_replicas

TOTAL, LOW, HIGH = 400, 1e-4, 1.0
HELD_OUT = [
    tuple(torch.cat(part) for part in zip(*(batch(r, k, seed=5) for r in range(4)), strict=True))
    for k in range(8)
]

pytestmark = pytest.mark.filterwarnings("ignore:the probe has")


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return (model(data[0]) - data[1]).square().mean()


def training_batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Give a rank its part of two batches."""
    both = [batch(r, step) for r in range(2)]
    return both[rank] if world_size == 2 else tuple(torch.cat(part) for part in zip(*both, strict=True))


class Run:
    """One training, which can be saved and loaded."""

    def __init__(self, lr: float, rank: int = 0, world_size: int = 1, **told: Any) -> None:
        self.place = rank, world_size
        self.net: nn.Module = Net()
        model = DistributedDataParallel(self.net) if world_size > 1 else self.net
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.records = hdet.Records()
        settings = {
            "controllers": [hdet.Thermostat()],
            "probe": hdet.Probe(HELD_OUT[rank::world_size], loss_of),
        }
        settings |= {"total_steps": TOTAL, "model": model, "records": self.records}
        self.auto = hdet.AutoLR(self.optimizer, **settings | told)

    def train(self, end: int = TOTAL) -> Run:
        while self.auto.num_steps < end:
            loss = loss_of(self.model, training_batch(self.auto.num_steps, *self.place))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.auto.step(loss)
        return self

    @property
    def factors(self) -> list[float]:
        return [factor for record in self.records for factor in record.section(ThermostatRecord).factors]

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]

    def saved(self) -> bytes:
        self.auto.converge()
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (self.net, self.optimizer, self.auto)], file)
        return file.getvalue()

    def load(self, saved: bytes) -> Run:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for part, state in zip((self.net, self.optimizer, self.auto), states, strict=True):
            part.load_state_dict(state)
        return self


def referred(lr: float, spread: float = 0.0, num_replicas: int = 1) -> tuple[list[float], list[Tensor]]:
    """Give the factors after each round and the final weights of the reference."""
    recipe, shapes = Recipe(total_steps=TOTAL), [p.shape for p in Net().parameters()]

    def parts(flat: Tensor) -> list[Tensor]:
        pieces = flat.split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def loss(flat: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
        return (predict(data[0], *parts(flat)) - data[1]).square().mean()

    def gradient(parameters: list[Tensor], replica: int, step: int) -> tuple[float, list[Tensor]]:
        leaf = parameters[0].clone().requires_grad_()
        value = loss(leaf, training_batch(step - 1, replica, num_replicas))
        return value.item(), list(torch.autograd.grad(value, leaf))

    watch = ThermostatWatch(
        TOTAL,
        peak=lr,
        probe=lambda at: torch.stack([loss(at[0], data) for data in HELD_OUT]).mean().item(),
        replicas_differ=spread > 0,
    )
    trace = reference.train(
        [torch.cat([p.detach().flatten() for p in Net().parameters()])],
        gradient=gradient,
        optimizer=reference.adam(decoupled_weight_decay=0.01),
        schedule=lambda t: [lr * recipe.shape(min(t, TOTAL))],
        num_replicas=num_replicas,
        spread=spread,
        sync_every=recipe.steps_per_round,
        total_steps=TOTAL,
        names=["lr"],
        average_tail=recipe.average_tail,
        watches=[watch],
    )
    return watch.factors, parts(trace.parameters[0][0])


@pytest.mark.parametrize("sync_every", [None, 10, 64])
@pytest.mark.parametrize("lr", [LOW, HIGH])
def test_one_device_equals_the_reference(lr: float, sync_every: int | None):
    run = Run(lr, sync_every=sync_every).train()
    factors, weights = referred(lr)
    assert run.factors == pytest.approx(factors, rel=1e-6) and len(factors) == LAST
    assert factors[-1] > 1.5 if lr == LOW else factors[-1] < 0.7  # there is something to repair
    assert not run.records[-1].controllers["guard"].num_brakes
    assert run.auto.found_lr["lr"] == pytest.approx(lr * factors[-1])
    for mine, expected in zip(run.weights, weights, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-8)
    note = run.auto.summary().splitlines()[-1]
    assert note.startswith(
        f"thermostat: x{factors[-1]:.3g} after 14 of 14 rounds, averaging a round's weights"
    )


def _rank(rank: int) -> tuple[list[Tensor], list[float]]:
    run = Run(LOW, rank, 2).train()
    return run.weights, run.factors


def test_two_ranks_with_halves_of_the_data_move_as_one_with_all_of_it():
    (mine, factors), (theirs, _) = run_replicas(_rank, 2)
    alone = Run(LOW).train()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert factors == pytest.approx(alone.factors, rel=1e-6)
    for a, b in zip(mine, alone.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


class VirtualRun:
    """Two virtual replicas with the recipe and a thermostat."""

    def __init__(self, lr: float, spread: float, **told: Any) -> None:
        self.net, self.records = Net(), hdet.Records()
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr)
        settings = settings_of(Recipe(total_steps=TOTAL), optimizer) | {"records": self.records}
        settings |= {"explore": [hdet.LearningRate(spread)], "probe": hdet.Probe(HELD_OUT, loss_of)}
        settings["controllers"].append(hdet.Thermostat())
        self.ensemble = hdet.VirtualEnsemble(self.net, optimizer, loss_of, num_replicas=2, **settings | told)

    def train(self, end: int = TOTAL) -> VirtualRun:
        while (step := self.ensemble.engine.num_steps) < end:
            self.ensemble.step(batches=[batch(r, step) for r in range(2)])
        return self

    factors, weights = Run.factors, Run.weights


@pytest.mark.parametrize("join_equal", [False, True])
def test_rows_that_are_equal_move_as_one_process_does(join_equal: bool):
    run = VirtualRun(LOW, 0.0, join_equal=join_equal).train()
    factors, weights = referred(LOW)
    assert run.factors == pytest.approx(factors, rel=1e-6)
    for mine, expected in zip(run.weights, weights, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-8)


def test_rows_that_differ_equal_the_reference():
    run = VirtualRun(LOW, 1 / 9).train()
    factors, weights = referred(LOW, 1 / 9, num_replicas=2)
    assert run.factors == pytest.approx(factors, rel=1e-6) and factors[-1] > 1.5
    for mine, expected in zip(run.weights, weights, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-8)


def _with_spread(rank: int) -> tuple[list[Tensor], list[float]]:
    run = Run(LOW, rank, 2, spread=1 / 9, probe=hdet.Probe(HELD_OUT, loss_of)).train()
    return run.weights, run.factors


def test_ranks_that_differ_move_as_rows_that_differ():
    (mine, factors), (theirs, _) = run_replicas(_with_spread, 2)
    rows = VirtualRun(LOW, 1 / 9).train()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert factors == pytest.approx(rows.factors, rel=1e-6) and len(factors) == LAST
    for a, b in zip(mine, rows.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("stop_at", [66, 84, 150])
def test_rows_that_differ_resume_in_the_same_bits(stop_at: int):
    whole, first, again = (VirtualRun(LOW, 1 / 9) for _ in range(3))
    first.train(stop_at).ensemble.converge()
    again.ensemble.load_state_dict(first.ensemble.state_dict())
    again.train()
    whole.train(stop_at).ensemble.converge()
    whole.train()
    assert all(torch.equal(a, b) for a, b in zip(again.weights, whole.weights, strict=True))
    assert first.factors + again.factors == whole.factors


def _resumed_with_spread(rank: int) -> list[bool]:
    probe = hdet.Probe(HELD_OUT, loss_of)
    whole, first, again = (Run(LOW, rank, 2, spread=1 / 9, probe=probe) for _ in range(3))
    saved: list[Any] = [None, None]
    torch.distributed.all_gather_object(saved, first.train(66).saved())
    again.load(saved[0]).train()
    whole.train(66).auto.converge()
    whole.train()
    return [torch.equal(a, b) for a, b in zip(again.weights, whole.weights, strict=True)]


def test_ranks_that_differ_resume_from_the_checkpoint_of_the_first():
    assert all(map(all, run_replicas(_resumed_with_spread, 2)))


STOPS = [66, 84, 100, 150]
"""Within a round at a sync, within a round, at the end of a round, and after the last."""


@pytest.mark.parametrize("stop_at", STOPS)
def test_a_resumed_run_ends_in_the_same_bits(stop_at: int):
    whole = Run(LOW).train()
    first = Run(LOW).train(stop_at)
    again = Run(LOW).load(first.saved()).train()
    assert all(torch.equal(a, b) for a, b in zip(again.weights, whole.weights, strict=True))
    assert first.factors + again.factors == whole.factors


def _resumed(rank: int) -> list[bool]:
    whole = Run(LOW, rank, 2).train()
    are_equal = []
    for stop_at in (66, 83):
        first = Run(LOW, rank, 2).train(stop_at)
        saved: list[Any] = [None, None]
        torch.distributed.all_gather_object(saved, first.saved())
        again = Run(LOW, rank, 2).load(saved[0]).train()
        are_equal += [torch.equal(a, b) for a, b in zip(again.weights, whole.weights, strict=True)]
    return are_equal


def test_two_ranks_resume_from_the_checkpoint_of_the_first():
    assert all(map(all, run_replicas(_resumed, 2)))


def _spoilt(rank: int) -> tuple[list[Tensor], list[float]]:
    run = Run(LOW, rank, 2)

    def spoil(*_: Any) -> None:
        if rank == 1 and run.auto.num_steps == 65:  # the next step is a sync
            next(run.net.parameters()).data.fill_(math.nan)

    run.optimizer.register_step_post_hook(spoil)
    run.train()
    return run.weights, run.factors


def test_a_replica_that_is_healed_begins_the_mean_of_the_round_again():
    (mine, factors), (theirs, _) = run_replicas(_spoilt, 2)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert factors == pytest.approx(Run(LOW).train().factors, rel=0.1)


def _sharded(rank: int, folder: str) -> tuple[list[float], list[float]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))

    def build() -> Any:
        net = Net()
        fully_shard(net, mesh=mesh["shard"])
        optimizer, records = torch.optim.AdamW(net.parameters(), lr=LOW), hdet.Records()
        probe = hdet.Probe(HELD_OUT[rank::2], loss_of)
        told = {"controllers": [hdet.Thermostat()], "probe": probe, "records": records}
        return net, optimizer, hdet.AutoLR(optimizer, total_steps=TOTAL, model=net, **told), records

    def train(net: Any, optimizer: Any, auto: Any, records: Any, end: int) -> list[float]:
        while auto.num_steps < end:
            loss = loss_of(net, training_batch(auto.num_steps, rank, 2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            auto.step(loss)
        auto.converge()
        return [factor for record in records for factor in record.section(ThermostatRecord).factors]

    def state_of(net: Any, optimizer: Any, auto: Any, _: Any) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(net, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "auto": auto.state_dict()}

    run, again = build(), build()
    train(*run, 84)
    dcp.save(state_of(*run), checkpoint_id=folder)
    state = state_of(*again)
    dcp.load(state, checkpoint_id=folder)
    of_auto = copy.deepcopy(state["auto"])
    set_state_dict(*again[:2], model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    again[2].load_state_dict(of_auto)
    return train(*run, 150), train(*again, 150)


def test_a_sharded_replica_moves_alike_and_goes_on_from_a_distributed_checkpoint(tmp_path):
    (factors, resumed), _ = run_replicas(_sharded, 2, str(tmp_path))
    expected = Run(LOW).train(150).factors
    assert factors == pytest.approx(expected, rel=1e-6)
    # The round that was saved is averaged from there on only, so that its mean is another one.
    assert resumed == pytest.approx(expected[-len(resumed) :], rel=0.05) and len(resumed) == LAST - 8


def test_scoring_leaves_weights_moments_statistics_and_random_numbers_as_they_were(monkeypatch):
    def train(**told: Any) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2)).double()
        optimizer = torch.optim.AdamW(net.parameters(), lr=LOW)
        auto = hdet.AutoLR(optimizer, total_steps=TOTAL, model=net, **told)
        for step in range(TOTAL):
            loss = loss_of(net, batch(0, step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            auto.step(loss)
        return [*net.state_dict().values(), torch.get_rng_state()]

    monkeypatch.setattr("hdet.method.thermostat.steered", lambda state, seen, _: state._replace(
        rounds=(*state.rounds, seen)
    ))  # fmt: skip
    told = {"controllers": [hdet.Thermostat()], "probe": hdet.Probe(HELD_OUT, loss_of)}
    assert all(map(torch.equal, train(**told), train()))


def test_nothing_is_kept_after_the_last_round():
    run = Run(LOW).train(139)
    kept = list(run.auto.controllers)[-1]
    assert isinstance(kept._mean, Tail)
    run.train(140)
    assert kept._mean is None and len(run.factors) == LAST - 1
    state = run.auto.state_dict()["controllers"]["thermostat"]
    assert not state["mean"] and state["num_rounds"] == LAST

"""Several controllers at once: what each keeps beside the others, and which do not go together."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.explore import ExploredValues
from hdet.round_record import GuardRecord, ThermostatRecord, WeightDecayRecord
from hdet.steering import STEERINGS
from tests.helpers.errors import error_of
from tests.helpers.models import Net, all_equal, batch, loss_of
from tests.helpers.replicas import run_replicas

STEPS, SYNC = 200, 5
JUMP = range(100, 130)
"""Steps whose targets are 200 times as large, so that a guard goes back."""

CONTROLLERS = {
    "guard": hdet.Guard(factor=4.0),
    "paper": hdet.Controller(form="paper", end=0.7),
    "log": hdet.Controller(form="log"),
    "thermostat": hdet.Thermostat(),
    "weight_decay": hdet.HeldOutWeightDecay(start="auto"),
}
LISTS = [
    names
    for size in range(2, len(CONTROLLERS))
    for names in itertools.combinations(CONTROLLERS, size)
    if not {"paper", "log"} <= set(names)
]
ACCEPTED = [names for names in LISTS if not {"paper", "thermostat"} <= set(names)]
REFUSED = [names for names in LISTS if names not in ACCEPTED]
each_list = pytest.mark.parametrize("names", ACCEPTED, ids="+".join)
each_engine = pytest.mark.parametrize("engine", ["rows", "one process"])


def lr_spread(names: Sequence[str]) -> float:
    """Replicas may not differ in the learning rate where two controllers would move it then."""
    return 0.0 if {"log", "thermostat"} <= set(names) else 1 / 9


def noise(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Examples with nothing to learn, so that all that is learnt of them is overfitting."""
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return draw(count, 3), draw(count, 2)


def shifted_loss(model: nn.Module, data: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Add a number to the loss, which gradients do not see."""
    return loss_of(model, data[:2]) + data[2]


class Play:
    """A short run with these controllers: virtual replicas, one process, or a rank of several.

    Args:
        engine: where replicas live.
        names: of the controllers, in the order in which they are given.
        probe: scores replicas.
    """

    def __init__(self, engine: str, names: Sequence[str], probe: Callable[..., Tensor] = loss_of) -> None:
        self.net, self.data = Net(), [noise(8, seed=r) for r in range(4)]
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=2e-3, weight_decay=0.01)
        self.records = hdet.Records()
        told: dict[str, Any] = {
            "explore": [hdet.LearningRate(lr_spread(names)), hdet.Momentum(0.1)],
            "controllers": [CONTROLLERS[name] for name in names],
            "probe": hdet.Probe([noise(256, seed=9)], probe),
            "sync_every": SYNC,
            "total_steps": STEPS,
            "records": self.records,
        }
        self.has_rows = engine == "rows"
        self.model = DistributedDataParallel(self.net) if dist.is_initialized() else self.net
        self.whole: Any
        if self.has_rows:
            self.whole = hdet.VirtualEnsemble(self.net, self.optimizer, shifted_loss, num_replicas=4, **told)
            self.engine = self.whole.engine
        else:
            self.engine = self.whole = hdet.Ensemble(self.optimizer, model=self.model, **told)
        self.tunables = {tunable.name: tunable for tunable in self.engine.explored.tunables}

    def train(self, end: int, shifts: Callable[[], float] = lambda: 0.0) -> None:
        while self.engine.num_steps < end:
            scale = 200 if self.engine.num_steps in JUMP else 1
            count = self.engine.replicas.count
            batches = [
                (x, y * scale, torch.tensor(shifts(), dtype=torch.float64)) for x, y in self.data[:count]
            ]
            if self.has_rows:
                self.whole.step(batches=batches)
                continue
            loss = shifted_loss(self.model, batches[self.engine.replicas.index])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.whole.step(loss)

    def factors(self) -> dict[str, dict[str, float]]:
        return {name: dict(tunable.factors) for name, tunable in self.tunables.items()}

    def _parts(self) -> dict[str, Any]:
        if self.has_rows:
            return {"whole": self.whole}
        return {"net": self.net, "optimizer": self.optimizer, "whole": self.whole}

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({name: part.state_dict() for name, part in self._parts().items()})

    def load(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(copy.deepcopy(state[name]))


@functools.cache
def played(engine: str, names: tuple[str, ...]) -> tuple[Play, list[dict[str, Any]], list[dict[str, Any]]]:
    """Give a whole run, its state after every sync, and the factors then."""
    play = Play(engine, names)
    states, factors = [play.state()], [play.factors()]
    for end in range(SYNC, STEPS + 1, SYNC):
        play.train(end)
        states.append(play.state())
        factors.append(play.factors())
    return play, states, factors


def brakes(play: Play) -> list[int]:
    """Give the number of times that the guard has gone back by each sync."""
    return [0, *(record.section(GuardRecord).num_brakes for record in play.records)]


def check_brakes(names: Sequence[str], counts: Sequence[int], factors: Sequence[Any]) -> None:
    """A brake divides what is there, and each other's factor is as it was."""
    assert counts[-1] == (2 if "guard" in names else 0)
    for (count, before), (new_count, after) in itertools.pairwise(zip(counts, factors, strict=True)):
        if new_count > count:
            assert after["lr"]["guard"] == pytest.approx(before["lr"].get("guard", 1.0) / 4)
            others = [{**factor, "lr": factor["lr"] | {"guard": 0.0}} for factor in (before, after)]
            assert others[0] == others[1]


# --- what each keeps ---------------------------------------------------------------------------------


@each_engine
@each_list
def test_a_brake_divides_what_is_there_and_all_factors_survive_it(engine: str, names: tuple[str, ...]):
    play, _, factors = played(engine, names)
    counts = brakes(play)
    check_brakes(names, counts, factors)
    for (count, before), (new_count, after) in itertools.pairwise(
        zip(counts, [None, *play.records], strict=True)
    ):
        if new_count > count:
            assert after.base["lr"] == pytest.approx(before.base["lr"] / 4)
            assert {**after.base, "lr": 0.0} == {**before.base, "lr": 0.0}
    last = factors[-1]
    if "thermostat" in names:
        told = [factor for record in play.records for factor in record.section(ThermostatRecord).factors]
        assert last["lr"]["thermostat"] == told[-1] > 1.5
    if "weight_decay" in names:
        moves = [record.section(WeightDecayRecord).move for record in play.records]
        assert last["weight_decay"]["weight_decay"] == pytest.approx(1250 * math.exp(sum(moves)))
        assert sum(moves) > 0.05
    if "log" in names and engine == "rows":
        assert last["momentum"]["comparing"] != 1 and ("comparing" in last["lr"]) == (lr_spread(names) > 0)
    if "paper" in names:
        assert "comparing" not in last["lr"] and play.tunables["lr"].held != [2e-3]


@each_engine
@each_list
def test_a_base_is_what_is_planned_or_held_times_all_factors(engine: str, names: tuple[str, ...]):
    play, _, _ = played(engine, names)
    for name, tunable in play.tunables.items():
        planned = tunable.held[0] if tunable.held else tunable.slots[0].scheduled
        inner = (1 - planned if name == "momentum" else planned) * math.prod(tunable.factors.values())
        assert tunable.base == pytest.approx(1 - inner if name == "momentum" else inner)
    assert all(base > 0 for record in play.records for trace in record.base_trace.values() for base in trace)


@each_engine
@each_list
def test_a_list_in_another_order_resumes_bit_for_bit_from_any_sync(engine: str, names: tuple[str, ...]):
    _, states, factors = played(engine, names)
    near_jump = JUMP.start // SYNC
    for start in {*range(0, STEPS // SYNC, 4), *range(near_jump - 1, near_jump + 6), STEPS // SYNC - 1}:
        again = Play(engine, names[::-1])
        again.load(states[start])
        again.train((start + 1) * SYNC)
        assert again.factors() == factors[start + 1]
        assert all_equal(again.state(), states[start + 1]), f"from sync {start}"


def wild_loss(model: nn.Module, data: Any) -> Tensor:
    """A score that has nothing to do with how well a model does."""
    assert isinstance(model, Net)
    return 1e3 * torch.sin(1e6 * sum(p.sum() for p in model.parameters())) + 0 * loss_of(model, data)


@pytest.mark.filterwarnings("ignore:no loss was given:hdet.HdetWarning")  # a replica saw none that is finite
@pytest.mark.filterwarnings("ignore:the loss is below zero:hdet.HdetWarning")
@each_list
def test_no_base_crosses_zero_whatever_the_losses_are(names: tuple[str, ...]):
    play, draw = Play("rows", names, wild_loss), random.Random("+".join(names))
    play.train(STEPS, lambda: draw.choice([0.0, 1e30, -1e30, 10.0, -10.0, math.nan]))
    bases = [base for record in play.records for trace in record.base_trace.values() for base in trace]
    assert len(bases) >= 2 * STEPS / SYNC and all(0 < base < math.inf for base in bases)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.floats(1e-3, 1e3)), min_size=1, max_size=12),
    st.booleans(),
)
def test_each_controller_has_a_factor_of_its_own(moves: list[tuple[str, float]], is_bounded: bool):
    bounds = (1e-4, 1.0) if is_bounded else None
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    (tunable,) = ExploredValues([hdet.LearningRate(0.5, bounds=bounds)], optimizer).tunables
    for name, number in moves:
        before = dict(tunable.factors)
        if name:
            assert tunable.set_factor(name, number) == tunable.factors[name] > 0
        else:
            assert tunable.hold(number) > 0
        assert {**before, name: 0.0} == {**before, **tunable.factors, name: 0.0}
        planned = tunable.slots[0].scheduled if tunable.held is None else tunable.held[0]
        product = planned * math.prod(tunable.factors.values())
        assert tunable.base > 0 and (is_bounded or tunable.base == pytest.approx(product))
        assert not is_bounded or 1e-4 <= tunable.base <= 1.0


def _on_rank(rank: int) -> list[Any]:
    found = []
    for names in (names for names in ACCEPTED if len(names) > 2 and "guard" in names):
        play, states, factors = played.__wrapped__("ranks", names)
        if rank == 0:
            check_brakes(names, brakes(play), factors)
        found.append((factors, play.engine.base))
        for start in (7, 19, 26):
            again = Play("ranks", names[::-1])
            again.load(states[start])
            again.train((start + 1) * SYNC)
            assert all_equal(again.state(), states[start + 1]), (names, start)
    return found


def test_ranks_steer_alike_and_resume_bit_for_bit():
    mine, theirs = run_replicas(_on_rank, 2)
    assert mine == theirs and len(mine) == 5


# --- the bug that showed it --------------------------------------------------------------------------


def braked(
    controller: hdet.Controller, probe: Callable[..., Tensor] | None = None
) -> list[tuple[int, float]]:
    """Give brakes so far and the base after each sync, where the targets jump for 70 steps."""
    net, records = Net(), hdet.Records()
    ensemble = hdet.VirtualEnsemble(
        net,
        torch.optim.SGD(net.parameters(), lr=0.05),
        loss_of,
        num_replicas=4,
        explore=[hdet.LearningRate(1 / 9)],
        sync_every=5,
        total_steps=300,
        controllers=[hdet.Guard(), controller],
        probe=None if probe is None else hdet.Probe([noise(8, 0)], probe),
        records=records,
    )
    for step in range(180):
        scale = 200 if 100 <= step < 170 else 1
        ensemble.step(batches=[(x, y * scale) for x, y in (batch(r, step) for r in range(4))])
    return [(record.section(GuardRecord).num_brakes, record.base["lr"]) for record in records]


@pytest.mark.parametrize("form", ["paper", "log"])
def test_a_brake_divides_the_learning_rate_that_a_comparing_controller_has_come_to(form: Any):
    rounds = braked(hdet.Controller(form=form))
    braking = [(a, b) for a, b in itertools.pairwise(rounds) if b[0] > a[0]]
    assert len(braking) == 2 and all(b[1] == pytest.approx(a[1] / 3) for a, b in braking)
    assert min(base for _, base in rounds) > 0.005, "it was -0.549 with the paper's form"


@pytest.mark.filterwarnings("ignore:the controller has moved lr to:hdet.HdetWarning")
def test_a_brake_lowers_a_learning_rate_that_was_corrected_to_a_tenth():
    first = Net().w1.detach().clone()
    lowest_wins = hdet.Controller(form="log", step_size=1.0, momentum=0.0, max_correction=10.0)
    rounds = braked(lowest_wins, lambda model, _: (model.w1 - first).abs().sum())
    brake = next(i for i, (count, _) in enumerate(rounds) if count)
    assert rounds[brake - 1][1] == pytest.approx(0.005, rel=0.05)
    assert rounds[brake][1] == pytest.approx(rounds[brake - 1][1] / 3), "it was a third of what was planned"


# --- which are accepted, at every door -----------------------------------------------------------------


def doors(net: Net, spread: float, **told: Any) -> dict[str, Callable[[], Any]]:
    """Give what builds each door with these settings."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
    common = {"model": net, "probe": hdet.Probe([noise(256, seed=9)], loss_of)} | told
    virtual = {name: value for name, value in common.items() if name != "model"}
    explored = {"explore": [hdet.LearningRate(spread)], "sync_every": SYNC, "total_steps": STEPS}
    one_cycle = {"ensemble_lr_spread_ratio": spread, "model_sync_interval": SYNC, "total_steps": STEPS}
    return {
        "Ensemble": lambda: hdet.Ensemble(optimizer, **explored, **common),
        "VirtualEnsemble": lambda: (
            hdet.VirtualEnsemble(net, optimizer, loss_of, **explored, **virtual).engine
        ),
        "OneCycleAutoLR": lambda: hdet.OneCycleAutoLR(optimizer, 2e-3, **one_cycle, **common).ensemble,
        "AutoLR": lambda: hdet.AutoLR(optimizer, total_steps=STEPS, sync_every=SYNC, spread=spread, **common),
    }


@pytest.mark.parametrize("door", doors(Net(), 0.0))
@pytest.mark.filterwarnings("ignore:the controller has nothing to compare:hdet.HdetWarning")
def test_every_door_takes_the_same_lists(door: str):
    for names in ACCEPTED:
        for order in (names, names[::-1]):
            controllers = [CONTROLLERS[name] for name in order]
            engine = doors(Net(), lr_spread(names), controllers=controllers)[door]()
            kinds = {type(one) for one in controllers} | ({hdet.Guard} if door == "AutoLR" else set())
            assert [one.kind for one in engine.controllers] == [s.kind for s in STEERINGS if s.kind in kinds]


BOTH = (
    "controllers must not hold both an hdet.Controller and an hdet.Thermostat here, got ['lr'] to be moved "
    "by both: leave one out, or give the learning rate no spread: hdet.LearningRate(spread=0)"
)


@pytest.mark.parametrize("door", doors(Net(), 0.0))
def test_every_other_list_is_refused_with_what_to_write_instead(door: str):
    def refusal(controllers: Sequence[Any], spread: float = 1 / 9) -> str:
        return error_of(doors(Net(), spread, controllers=controllers)[door])

    assert len(REFUSED) == 4
    for names in REFUSED:
        assert refusal([CONTROLLERS[name] for name in names]) == f"{BOTH} and form='log'"
    for names in ACCEPTED:
        if {"log", "thermostat"} <= set(names):
            assert refusal([CONTROLLERS[name] for name in names]) == BOTH
    for one in CONTROLLERS.values():
        name = type(one).__name__
        assert refusal([one, one]) == (
            f"controllers must name each kind once, got two of hdet.{name}: they would move the same things, "
            "leave one out"
        )
        assert refusal(one).endswith(f": write [hdet.{name}()]")
        assert refusal([type(one)]).endswith(f": write [hdet.{name}()]")


def test_a_weight_decay_is_moved_by_one_of_two():
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.01)
    text = error_of(
        hdet.AutoLR,
        optimizer,
        model=net,
        total_steps=STEPS,
        explore=[hdet.WeightDecay(0.5)],
        controllers=[hdet.HeldOutWeightDecay(), hdet.Controller()],
        probe=hdet.Probe([noise(8, 0)], loss_of),
    )
    assert text == (
        "explore must not hold an hdet.WeightDecay beside a HeldOutWeightDecay, got one: held-out data moves "
        "the weight decay of equal replicas. Leave one of both out"
    )


def test_the_papers_controller_is_asked_for_once():
    text = error_of(
        hdet.OneCycleAutoLR,
        torch.optim.SGD(Net().parameters(), lr=0.1),
        0.1,
        total_steps=STEPS,
        auto_lr_warmup_steps=60,
        enable_auto_lr=True,
        controllers=[hdet.Guard(), hdet.Controller(form="log")],
    )
    assert text.startswith(
        "enable_auto_lr must be False where controllers has an hdet.Controller, got True: "
    )
    assert text.endswith("leave out either")


def test_every_door_takes_the_probe_of_the_search():
    net, probe = Net(), hdet.Probe([noise(256, seed=9)], loss_of)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    hdet.find_lr(net, optimizer, [noise(8, k) for k in range(9)], loss_of, total_steps=50, probe=probe)
    told = {"probe": probe, "controllers": [hdet.Thermostat(), hdet.HeldOutWeightDecay()]}
    for door in doors(net, 0.0):
        assert doors(Net(), 0.0, **told)[door]().replicas.probe is probe
        text = error_of(doors(Net(), 0.0, probe=loss_of)[door])
        assert text.startswith("probe must be an hdet.Probe") and text.endswith(
            "write hdet.Probe([(x, y)], loss)"
        )

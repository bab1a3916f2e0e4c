"""Every hyperparameter through the same life: read, spread, converge, steer, bounds, resume, close."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.round_record import ComparingRecord
from tests.helpers.errors import error_of
from tests.helpers.models import linear
from tests.helpers.replicas import run_replicas


class Attention(nn.Module):
    """Attention with a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5
        self.own = hdet.AttentionScale(0.5)
        self.drop_prob = 0.2


class Model(nn.Module):
    """Everything that the family explores."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)
        self.attention = Attention()
        self.drop = nn.Sequential(nn.Dropout(0.1), nn.Dropout2d(0.2))
        self.mha = nn.MultiheadAttention(4, 2, dropout=0.3)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.gamma = 2.0


@dataclass
class World:
    """One replica's model and optimizer."""

    model: Model
    optimizer: torch.optim.Optimizer


def make_world(optimizer: str = "adamw") -> World:
    model = Model()
    groups = [
        {"params": model.body.parameters()},
        {"params": [*model.head.parameters(), *model.mha.parameters()]},
    ]
    if optimizer == "sgd":
        return World(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1))
    return World(model, torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1, eps=1e-8))


@dataclass(frozen=True)
class Member:
    """How to build a hyperparameter, and where its values really are."""

    build: Callable[[World], Any]
    read: Callable[[World], list[float]]
    optimizer: str = "adamw"


def groups(key: str, place: int | None = None) -> Callable[[World], list[float]]:
    def read(world: World) -> list[float]:
        held = [group[key] for group in world.optimizer.param_groups]
        return [float(value if place is None else value[place]) for value in held]

    return read


MEMBERS: dict[str, Member] = {
    "lr": Member(lambda w: hdet.LearningRate(0.2), groups("lr")),
    "lr of all groups": Member(lambda w: hdet.LearningRate(0.2, per_group=False), groups("lr")),
    "lr, log scale": Member(lambda w: hdet.LearningRate(3.0, scale="log"), groups("lr")),
    "weight decay": Member(lambda w: hdet.WeightDecay(0.5), groups("weight_decay")),
    "sgd momentum": Member(lambda w: hdet.Momentum(0.3), groups("momentum"), "sgd"),
    "beta1": Member(lambda w: hdet.Momentum(0.3), groups("betas", 0)),
    "beta2": Member(lambda w: hdet.Beta2(0.5), groups("betas", 1)),
    "epsilon": Member(lambda w: hdet.Epsilon(), groups("eps")),
    "dropout": Member(
        lambda w: hdet.Dropout(w.model, 0.3),
        lambda w: [w.model.drop[0].p, w.model.drop[1].p, w.model.mha.dropout],
    ),
    "dropout by name": Member(
        lambda w: hdet.Dropout(w.model, 0.3, pattern="drop.1"), lambda w: [w.model.drop[1].p]
    ),
    "attention temperature": Member(
        lambda w: hdet.AttentionTemperature(w.model, 0.2),
        lambda w: [w.model.attention.scale, w.model.attention.own.attention_scale],
    ),
    "module attribute": Member(
        lambda w: hdet.ModuleAttribute(w.model, "drop_prob", 0.3, bounds=(0, 0.5)),
        lambda w: [w.model.attention.drop_prob],
    ),
    "label smoothing": Member(
        lambda w: hdet.LabelSmoothing(w.model, 0.5), lambda w: [w.model.criterion.label_smoothing]
    ),
    "scalar (focal gamma)": Member(
        lambda w: hdet.Scalar(
            "focal_gamma",
            get=lambda: w.model.gamma,
            set=lambda gamma: setattr(w.model, "gamma", gamma),
            spread=0.5,
            bounds=(0, 5),
            changes_loss=True,
        ),
        lambda w: [w.model.gamma],
    ),
}
EVERY, ROUNDS = 2, 30


def live(
    rank: int, name: str, form: str, direction: float, checkpoint: bytes | None = None
) -> dict[str, Any]:
    """A run in which the loss is planted: it falls (or rises) with the replica's multiplier."""
    member = MEMBERS[name]
    world = make_world(member.optimizer)
    original = member.read(world)
    settings: dict[str, Any] = {"form": form, "momentum": 0.5}
    if form == "paper":
        settings["temperature"] = 1.0
    records = hdet.Records()

    def planted(model: nn.Module, _: torch.Tensor) -> torch.Tensor:
        place = ensemble.positions
        return torch.tensor(1.0 - direction * sum(place.values()) / len(place), dtype=torch.float64)

    ensemble = hdet.Ensemble(
        world.optimizer,
        model=world.model,
        explore=[member.build(world)],
        sync_every=EVERY,
        controllers=[hdet.Controller(**settings)],
        probe=hdet.Probe([torch.zeros(1)], planted),
        assignment="latin",
        records=records,
    )
    first_values = member.read(world)
    first_multipliers = list(ensemble.multipliers.values())
    with ensemble.base_values():
        inside = member.read(world)
    after = member.read(world)
    start = 0
    if checkpoint is not None:
        state = torch.load(io.BytesIO(checkpoint), weights_only=True)
        world.optimizer.load_state_dict(state["optimizer"])
        ensemble.load_state_dict(state["ensemble"])
        start = ensemble.num_steps
    saved, values = b"", []
    with torch.no_grad():
        world.model.body.weight.fill_(float(rank))
    for step in range(start, EVERY * ROUNDS):
        values.append(member.read(world))
        world.optimizer.step()
        ensemble.step()
        if step == 4:  # within a round
            ensemble.converge()
            file = io.BytesIO()
            torch.save({"optimizer": world.optimizer.state_dict(), "ensemble": ensemble.state_dict()}, file)
            saved = file.getvalue()
    averaged = world.model.body.weight[0, 0].item()
    with ensemble.base_values():
        final_base = member.read(world)
    ensemble.close()
    return {
        "original": original,
        "first_values": first_values,
        "first_multipliers": first_multipliers,
        "inside": inside,
        "after": after,
        "values": values,
        "saved": saved,
        "averaged": averaged,
        "final_base": final_base,
        "closed": member.read(world),
        "records": list(records),
    }


def inner(name: str, value: float) -> float:
    """Momentum and betas are spread as one minus themselves."""
    return 1 - value if name in ("sgd momentum", "beta1", "beta2") else value


@pytest.mark.parametrize("name", MEMBERS)
def test_life_of_a_hyperparameter(name: str) -> None:
    up = run_replicas(live, 4, name, "log", 1.0)
    down = run_replicas(live, 4, name, "log", -1.0)
    original = up[0]["original"]
    for results in (up, down):
        # Spread: all replicas differ, and the mean of the multipliers stays at the base.
        firsts = {tuple(r["first_values"]) for r in results}
        assert len(firsts) == 4
        for i, base in enumerate(original):
            inners = [inner(name, r["first_values"][i]) for r in results]
            if name in ("lr, log scale", "beta2", "epsilon"):
                mean = math.exp(sum(map(math.log, inners)) / 4)
            else:
                mean = sum(inners) / 4
            assert mean == pytest.approx(inner(name, base))
        for r in results:
            assert r["inside"] == pytest.approx(original)  # shared values inside base_values()
            assert r["after"] == r["first_values"]
            assert r["closed"] == original  # restored exactly
            assert r["averaged"] == pytest.approx(1.5, rel=0.2)  # converged (weight decay acts a little)
    # Steered: up where a larger multiplier is better, down where a smaller one is.
    for i, base in enumerate(original):
        assert inner(name, up[0]["final_base"][i]) > 1.05 * inner(name, base)
        assert inner(name, down[0]["final_base"][i]) < 0.95 * inner(name, base)
    assert all(r["final_base"] == up[0]["final_base"] for r in up)
    # Records hold values and probe losses.
    record = up[0]["records"][0]
    assert len(record.probes) == 4 and record.milliseconds["probe"] >= 0
    assert set(record.values) == set(record.base) == set(record.section(ComparingRecord).signal)


@pytest.mark.parametrize("name", MEMBERS)
def test_resume_in_the_middle_of_a_round(name: str) -> None:
    whole = run_replicas(live, 2, name, "log", 1.0)
    resumed = run_replicas(live, 2, name, "log", 1.0, whole[1]["saved"])
    for a, b in zip(whole, resumed, strict=True):
        assert a["values"][5:] == b["values"]
        assert a["final_base"] == b["final_base"]


@pytest.mark.parametrize("name", ["weight decay", "beta1", "dropout", "scalar (focal gamma)"])
def test_the_papers_form_steers_them_too(name: str) -> None:
    up = run_replicas(live, 2, name, "paper", 1.0)[0]
    down = run_replicas(live, 2, name, "paper", -1.0)[0]
    assert inner(name, up["final_base"][0]) > inner(name, up["original"][0])
    assert inner(name, down["final_base"][0]) < inner(name, down["original"][0])


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_bounds_hold_for_every_replica_and_round(name: str, direction: float) -> None:
    results = run_replicas(live, 4, name, "log", direction)
    hyperparameter = MEMBERS[name].build(make_world(MEMBERS[name].optimizer))
    if hyperparameter.bounds is None:
        return
    low, high = hyperparameter.bounds
    for result in results:
        assert all(low <= value <= high for values in result["values"] for value in values)
    # Still exploring at the end: the base never sticks to a bound.
    last = [tuple(result["values"][-1]) for result in results]
    assert len(set(last)) == 4


# --- unusual cases ----------------------------------------------------------------------------------


def tunables(hyperparameter: Any, world: World | None = None) -> list[Any]:
    return hyperparameter.tunables((world or make_world()).optimizer)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda w: hdet.Beta2(), "Beta2 found no 'betas' in the groups of SGD"),
        (lambda w: hdet.Dropout(nn.Linear(1, 1)), "Dropout found no dropout rate above zero in Linear"),
        (lambda w: hdet.Dropout(w.model, pattern="nowhere.*"), "pattern 'nowhere.\\*'"),
        (lambda w: hdet.AttentionTemperature(nn.Linear(1, 1)), "found no AttentionScale, attention_scale"),
        (lambda w: hdet.LabelSmoothing(nn.Linear(1, 1)), "found no CrossEntropyLoss with label_smoothing"),
        (
            lambda w: hdet.ModuleAttribute(w.model, "absent"),
            "found no attribute 'absent' above zero in Model",
        ),
    ],
)
def test_a_member_that_finds_nothing_says_what_it_looked_for(build: Callable, words: str) -> None:
    world = make_world("sgd")
    with pytest.warns(hdet.NoEffectWarning, match=words):
        assert tunables(build(world), world) == []


def test_groups_without_weight_decay_are_left_alone() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    mixed = torch.optim.AdamW([{"params": [parameters[0]]}, {"params": [parameters[1]], "weight_decay": 0}])
    assert [tunable.name for tunable in hdet.WeightDecay().tunables(mixed)] == ["weight_decay.0"]
    none = torch.optim.SGD(parameters, lr=0.1)
    with pytest.warns(hdet.NoEffectWarning, match="'weight_decay' above zero"):
        hdet.WeightDecay().tunables(none)


def test_a_zero_base_cannot_be_spread_and_warns() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.warns(hdet.NoEffectWarning, match="momentum is zero"):
        hdet.Momentum().tunables(optimizer)
    held = [0.0]
    with pytest.warns(hdet.NoEffectWarning, match="x is zero"):
        hdet.Scalar("x", get=lambda: held[0], set=lambda v: held.__setitem__(0, v)).tunables(optimizer)


def test_a_learning_rate_that_warms_up_from_zero_is_explored() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, t / 5))

    ensemble = hdet.Ensemble(
        optimizer,
        scheduler=scheduler,
        explore=[hdet.LearningRate(0.5)],
        replicas=hdet.replicas.ReplicaGroup(0, 4),
    )
    for _ in range(3):
        optimizer.step()
        ensemble.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.06 * ensemble.multipliers["lr"])
    assert ensemble.multipliers["lr"] != 1


def test_a_base_at_its_bound_warns() -> None:
    world = make_world()
    with pytest.warns(hdet.NoEffectWarning, match="dropout is 0.1, at the end of its range"):
        tunables(hdet.Dropout(world.model, pattern="drop.0", bounds=(0, 0.1)), world)


def test_a_base_outside_its_bounds_is_refused() -> None:
    world = make_world()
    with pytest.raises(ValueError, match=r"dropout must start inside its bounds \(0.0, 0.25\), got 0.3"):
        tunables(hdet.Dropout(world.model, bounds=(0, 0.25)), world)


@pytest.mark.parametrize("value", [3, True])
def test_whole_numbers_and_flags_are_refused(value: Any) -> None:
    module = nn.Module()
    module.depth = value
    with pytest.raises(TypeError, match=r"depth of Module must hold a float .* nothing in between"):
        tunables(hdet.ModuleAttribute(module, "depth"))
    with pytest.raises(TypeError, match="depth must hold a float"):
        tunables(hdet.Scalar("depth", get=lambda: value, set=lambda v: None))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=value)
    with pytest.raises(TypeError, match="lr of group 0 must hold a float"):
        hdet.LearningRate().tunables(optimizer)


def test_a_module_used_twice_is_one_field() -> None:
    shared = nn.Dropout(0.2)
    model = nn.Sequential(shared, nn.Linear(1, 1), shared)
    (tunable,) = tunables(hdet.Dropout(model))
    assert len(tunable.slots) == 1


def test_a_compiled_model_sees_the_new_rate() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(2, 4))
    (tunable,) = hdet.Dropout(compiled, bounds=(0, 1), pattern="1").tunables(  # pyright: ignore[reportArgumentType]
        torch.optim.SGD(model.parameters(), lr=0.1)
    )
    tunable.slots[0].factor = 0.0
    tunable.slots[0].put_value(is_traced=False)
    torch.testing.assert_close(compiled(torch.ones(2, 4)), model[0](torch.ones(2, 4)))


def test_a_frozen_group_is_explored_without_harm() -> None:
    world = make_world()
    world.model.body.requires_grad_(False)
    before = [p.detach().clone() for p in world.model.body.parameters()]
    records = hdet.Records()
    ensemble = hdet.Ensemble(world.optimizer, explore=[hdet.LearningRate()], sync_every=1, records=records)
    world.optimizer.step()
    ensemble.step(1.0)
    assert all(torch.equal(p, b) for p, b in zip(world.model.body.parameters(), before, strict=True))
    assert ensemble.num_steps == len(records) == 1
    assert not records[0].excluded


def test_modules_at_zero_are_left_alone() -> None:
    """Stochastic depth usually rises linearly from zero."""
    blocks = nn.ModuleList(nn.Module() for _ in range(3))
    for i, block in enumerate(blocks):
        block.drop_prob = 0.1 * i
    (tunable,) = tunables(hdet.ModuleAttribute(blocks, "drop_prob", 0.3, bounds=(0, 0.5)))
    assert len(tunable.slots) == 2 and tunable.share == 1


def momentum_under_pressure(rank: int, form: str) -> list[float]:
    """Less friction is always better: the momentum is pushed towards one."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.0, momentum=0.9)
    settings: dict[str, Any] = {"temperature": 0.1} if form == "paper" else {}
    ensemble = hdet.Ensemble(
        optimizer,
        explore=[hdet.Momentum(0.3)],
        sync_every=1,
        controllers=[hdet.Controller(form=form, step_size=0.9, momentum=0.5, **settings)],  # pyright: ignore[reportArgumentType]
    )
    seen = []
    for _ in range(200):
        optimizer.step()
        ensemble.step(1.0 + ensemble.positions["momentum"])
        seen.append(optimizer.param_groups[0]["momentum"])
    return seen


@pytest.mark.parametrize("form", ["paper", "log"])
def test_momentum_never_reaches_one(form: str) -> None:
    for seen in run_replicas(momentum_under_pressure, 2, form):
        assert max(seen) < 1
        assert seen[-1] > 0.98


def there_and_back(rank: int) -> tuple[float, float]:
    """Larger is better for 60 rounds, then smaller: the base must leave its bound again."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.0, weight_decay=0.1)
    ensemble = hdet.Ensemble(
        optimizer,
        explore=[hdet.WeightDecay(0.5, bounds=(0.01, 0.3))],
        sync_every=1,
        controllers=[hdet.Controller(step_size=1.0, momentum=0.5)],
    )
    bases = []
    for sign in (-1.0, 1.0):
        for _ in range(60):
            optimizer.step()
            ensemble.step(1.0 + sign * ensemble.positions["weight_decay"])
        bases.append(ensemble.base["weight_decay"])
    return bases[0], bases[1]


def test_a_base_at_its_bound_comes_back() -> None:
    high, low = run_replicas(there_and_back, 2)[0]
    assert 0.2 < high < 0.3
    assert 0.01 < low < 0.05


def scheduled_within_bounds(rank: int) -> list[tuple[float, float]]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    ensemble = hdet.Ensemble(
        optimizer,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40),
        explore=[hdet.LearningRate(0.2, bounds=(1e-3, 0.08)), hdet.Momentum(0.3, bounds=(0.86, 0.96))],
        sync_every=10,
    )
    seen = []
    for _ in range(40):
        (group,) = optimizer.param_groups
        seen.append((group["lr"], group["momentum"]))
        optimizer.step()
        ensemble.step(1.0)
    return seen


def test_bounds_hold_while_a_schedule_moves() -> None:
    for seen in run_replicas(scheduled_within_bounds, 2):
        assert all(1e-3 <= lr <= 0.08 and 0.86 <= momentum <= 0.96 for lr, momentum in seen)
        assert len({lr for lr, _ in seen}) > 5


def lr_signal(rank: int, with_dead_dial: bool) -> float:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, weight_decay=0.1)
    dead = [hdet.WeightDecay(spread=0.0)] if with_dead_dial else []
    records = hdet.Records()
    ensemble = hdet.Ensemble(
        optimizer,
        explore=[hdet.LearningRate(0.2), *dead],
        sync_every=1,
        controllers=[hdet.Controller()],
        records=records,
    )
    optimizer.step()
    ensemble.step(1.0 + ensemble.positions["lr"])
    return records[0].section(ComparingRecord).signal["lr"] if rank == 0 else 0.0


def test_a_dial_without_width_takes_nothing_from_the_others() -> None:
    assert run_replicas(lr_signal, 2, True)[0] == run_replicas(lr_signal, 2, False)[0] == pytest.approx(-1)


def test_names_must_be_unique() -> None:
    world = make_world()
    with pytest.raises(ValueError, match=r"name each hyperparameter once, got \['dropout'\]"):
        hdet.Ensemble(world.optimizer, explore=[hdet.Dropout(world.model), hdet.Dropout(world.model)])


def test_what_changes_the_loss_needs_a_probe() -> None:
    world = make_world()
    with pytest.raises(
        ValueError, match=r"probe must be given to steer \['label_smoothing'\], got None: .*Pass probe="
    ):
        hdet.Ensemble(
            world.optimizer, explore=[hdet.LabelSmoothing(world.model)], controllers=[hdet.Controller()]
        )
    hdet.Ensemble(world.optimizer, explore=[hdet.LabelSmoothing(world.model)])  # nothing is compared


def test_the_probe_leaves_no_trace() -> None:
    from hdet.replicas.losses import evaluating

    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2))
    model[2].eval()  # the user keeps this one in evaluation mode
    before = {k: v.clone() for k, v in model.state_dict().items()}

    with evaluating(model):
        assert not torch.is_grad_enabled()
        assert not any(module.training for module in model.modules())
        model(torch.randn(8, 2)).sum()
    assert [m.training for m in model.modules()] == [True, True, True, False]
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())

    with pytest.raises(RuntimeError, match="no data"), evaluating(model):
        raise RuntimeError("no data")
    assert [m.training for m in model.modules()] == [True, True, True, False]


def probe_with_nan(rank: int) -> tuple[dict, float]:
    parameter = nn.Parameter(torch.full((1,), float(rank)))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    score = torch.tensor(math.nan if rank == 1 else 1.0)
    records = hdet.Records()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ensemble = hdet.Ensemble(
            optimizer,
            explore=[hdet.Scalar("x", get=lambda: 1.0, set=lambda v: None)],
            sync_every=1,
            model=nn.ParameterList([parameter]),
            probe=hdet.Probe([torch.zeros(1)], lambda model, _: score),
            records=records,
        )
        optimizer.step()
        ensemble.step(1.0)
    return (records[0].excluded if rank == 0 else {}), parameter.item()


def test_a_replica_whose_probe_is_not_finite_is_left_out() -> None:
    results = run_replicas(probe_with_nan, 4)
    assert results[0][0] == {1: "the loss on the probe is not finite"}
    assert [value for _, value in results] == pytest.approx([5 / 3] * 4)


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: hdet.WeightDecay(bounds=(0.5, 0.1)), ValueError, "low < high"),
        (lambda: hdet.WeightDecay(bounds=0.5), TypeError, r"bounds must be a pair \(low, high\), got 0.5"),
        (
            lambda: hdet.WeightDecay(bounds=(-1.0, 0.1)),
            ValueError,
            r"bounds\[0\] must be a number of at least 0",
        ),
        (lambda: hdet.Dropout("model"), TypeError, r"model must be a torch\.nn\.Module"),
        (lambda: hdet.Dropout(nn.Linear(1, 1), pattern=3), TypeError, "pattern must be a text"),
        (lambda: hdet.Scalar("", get=float, set=print), TypeError, "name must be a text that is not empty"),
        (lambda: hdet.Scalar("x", get=1.0, set=print), TypeError, "get must be callable, got 1.0"),
        (
            lambda: hdet.Scalar("x", get=float, set=print, changes_loss=1),
            TypeError,
            "changes_loss must be True",
        ),
    ],
)
def test_bad_settings(build: Callable, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build()


@pytest.mark.parametrize(
    "explore", [hdet.WeightDecay(), hdet.WeightDecay, [hdet.WeightDecay], "weight_decay", ["weight_decay"]]
)
def test_what_is_explored_is_a_list_of_objects(explore: Any):
    model, optimizer = linear(0.01)
    for build in (hdet.AutoLR, hdet.Ensemble):
        text = error_of(build, optimizer, total_steps=100, model=model, explore=explore)
        assert text.startswith("explore must") and text.endswith(": write [hdet.WeightDecay()]")
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_a_remedy_names_what_needs_arguments_as_such():
    model, optimizer = linear(0.01)
    for given, write in ((hdet.Dropout, "[hdet.Dropout(...)]"), (3, "[hdet.LearningRate()]")):
        assert error_of(hdet.Ensemble, optimizer, model=model, explore=[given]).endswith(f"write {write}")


def test_a_weight_decay_is_set_in_the_optimizer_and_auto_is_a_start():
    assert error_of(hdet.HeldOutWeightDecay, start=0.1) == (
        "start must be 'auto' or None, got 0.1: set weight_decay=0.1 in the optimizer"
    )
    assert "got 'Auto': write start='auto'" in error_of(hdet.HeldOutWeightDecay, start="Auto")
    assert hdet.HeldOutWeightDecay(start="auto").start == "auto"


def test_a_weight_decay_of_zero_is_told_with_what_to_set():
    _, optimizer = linear(0.01, weight_decay=0.0)
    with pytest.warns(hdet.NoEffectWarning, match=r"does nothing: set weight_decay=0\.01 in the optimizer$"):
        assert hdet.WeightDecay().tunables(optimizer) == []
    with pytest.warns(hdet.NoEffectWarning, match="so it does nothing$"):  # it has none to set
        assert hdet.WeightDecay().tunables(torch.optim.Rprop([nn.Parameter(torch.ones(2))])) == []

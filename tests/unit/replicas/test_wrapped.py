"""What other libraries wrap around an optimizer, a schedule or a model: taken off, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer, lr_scheduler

import hdet
from hdet.replicas import ReplicaGroup
from hdet.replicas.optimizers import plain_model, without_ddp
from tests.helpers.models import Net, batch
from tests.helpers.ranks import message_of, train
from tests.helpers.replicas import run_replicas


class Accelerated(Optimizer):
    """As accelerate's AcceleratedOptimizer: it holds the real one and does not call super().__init__."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()


class AsOptim(Optimizer):
    """Others call it ``optim``, and share its groups."""

    def __init__(self, optim: Optimizer) -> None:
        self.optim = optim
        self.param_groups, self.state = optim.param_groups, optim.state

    def step(self, closure: Any = None) -> None:
        self.optim.step(closure)


class AcceleratedScheduler:
    """As accelerate's: no LRScheduler, and its step() does not move one on for each step of the optimizer."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self) -> None:
        raise AssertionError("the schedule itself is stepped")


WRAPPERS: list[Any] = [
    Accelerated,
    AsOptim,
    lambda optimizer: Accelerated(AsOptim(optimizer)),
]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("kind", ["Ensemble", "AutoLR", "OneCycleAutoLR", "ReplayLR"])
def test_a_wrapped_optimizer_is_driven_as_the_one_inside(kind: str, wrap: Any) -> None:
    def rates(is_wrapped: bool) -> list[float]:
        parameter = nn.Parameter(torch.ones(2))
        plain = SGD([parameter], lr=0.1)
        optimizer = wrap(plain) if is_wrapped else plain
        driver: Any = {
            "Ensemble": lambda: hdet.Ensemble(
                optimizer, scheduler=lr_scheduler.ExponentialLR(plain, 0.9), sync_every=4
            ),
            "AutoLR": lambda: hdet.AutoLR(optimizer, total_steps=100),
            "OneCycleAutoLR": lambda: hdet.OneCycleAutoLR(
                optimizer, 0.1, total_steps=100, cycle_momentum=False
            ),
            "ReplayLR": lambda: hdet.ReplayLR(optimizer, {"lr": [0.1, 0.2, 0.3]}),
        }[kind]()
        seen = []
        for _ in range(10):
            seen.append(plain.param_groups[0]["lr"])
            optimizer.step()
            driver.step() if kind == "ReplayLR" else driver.step(1.0)
            if kind != "ReplayLR":
                driver.step(1.0)  # gradients are accumulated: the optimizer has not stepped
        return seen

    assert rates(True) == rates(False)
    assert len(set(rates(True))) > 2


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_the_search_takes_a_wrapped_optimizer(wrap: Any) -> None:
    def find(is_wrapped: bool) -> list[float]:
        net = Net()
        plain = SGD(net.parameters(), lr=0.01)
        optimizer = wrap(plain) if is_wrapped else plain
        data = [batch(0, step) for step in range(20)]

        def loss(model: nn.Module, data: Any) -> torch.Tensor:
            return (model(data[0]) - data[1]).square().mean()

        found = hdet.find_lr(net, optimizer, data, loss, total_steps=100)
        assert plain.param_groups[0]["lr"] == 0.01
        found.write(optimizer)
        assert plain.param_groups[0]["lr"] == found.lr[0]
        return found.lr

    assert find(True) == find(False)


def test_a_wrapped_schedule_is_followed_as_the_one_inside() -> None:
    plain = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    wrapped = Accelerated(plain)
    schedule = lr_scheduler.StepLR(wrapped, step_size=1)
    schedule.total_steps = 20  # pyright: ignore[reportAttributeAccessIssue]
    ensemble = hdet.Ensemble(wrapped, scheduler=AcceleratedScheduler(schedule))  # pyright: ignore[reportArgumentType]
    assert ensemble.total_steps == 20 and ensemble.optimizer is plain
    wrapped.step()
    ensemble.step(1.0)
    assert schedule.last_epoch == 1


# --- wrappers written by hand ---------------------------------------------------------------------


class SAM(Optimizer):
    """Sharpness-aware minimization as it is often written: its two halves do not go through ``step``."""

    def __init__(self, params: Any, *, shares: bool = True, **defaults: Any) -> None:
        super().__init__(params, defaults)
        self.base_optimizer = SGD(self.param_groups, **defaults)
        if shares:
            self.param_groups = self.base_optimizer.param_groups
        else:
            self.base_optimizer.param_groups = [{**group} for group in self.param_groups]

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.detach().clone()
                p.add_(p.grad, alpha=0.01)

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # torch does not see them either
def test_an_optimizer_whose_steps_are_not_seen_is_counted_and_driven() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = SAM([parameter], lr=0.1)
    records = hdet.Records()
    ensemble = hdet.Ensemble(
        optimizer, scheduler=lr_scheduler.ExponentialLR(optimizer, 0.5), sync_every=2, records=records
    )
    moved = []
    for _ in range(4):
        before = parameter.detach().clone()
        parameter.grad = torch.ones(2)
        optimizer.first_step()
        optimizer.second_step()
        ensemble.step(1.0)
        moved.append((before - parameter).mean().item())
    assert moved == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    assert ensemble.num_steps == 4 and [record.step for record in records] == [2, 4]


def test_a_wrapper_with_groups_of_its_own_is_refused() -> None:
    optimizer = SAM([nn.Parameter(torch.ones(2))], lr=0.1, shares=False)
    with pytest.raises(ValueError, match=r"share its param_groups with the one .* 'base_optimizer', got SAM"):
        hdet.Ensemble(optimizer)


def test_an_optimizer_that_is_not_initialised_is_refused() -> None:
    class Unfinished(Optimizer):
        def __init__(self, params: Any) -> None:
            self.param_groups, self.state = [{"params": params, "lr": 0.1}], {}  # pyright: ignore

    with pytest.raises(TypeError, match=r"must call torch.optim.Optimizer.__init__, got a Unfinished"):
        hdet.Ensemble(Unfinished([nn.Parameter(torch.ones(2))]))


# --- compiled models ------------------------------------------------------------------------------


def test_a_compiled_model_is_the_one_inside() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    assert plain_model(compiled) is net and plain_model(net) is net and plain_model(None) is None
    assert without_ddp(compiled) is compiled  # type: ignore[arg-type]
    seen = []

    def scored(model: nn.Module, _: torch.Tensor) -> torch.Tensor:
        seen.append(model.training)
        return torch.tensor(2.0)

    ensemble = hdet.Ensemble(
        SGD(net.parameters(), lr=0.1),
        model=compiled,  # pyright: ignore[reportArgumentType]
        sync_every=1,
        probe=hdet.Probe([torch.ones(1, 1)], scored),
        replicas=ReplicaGroup(0, 2),
    )
    assert [float(loss) for loss in ensemble.replicas.score() or ()] == [2.0]
    assert seen == [False] and net.training


def _compiled(rank):
    torch.manual_seed(0)
    net = Net()
    ddp = DistributedDataParallel(net)
    model = torch.compile(ddp, backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    data = [batch(rank, step) for step in range(20)]
    seen = set()

    def loss(model, data):
        seen.add(type(model).__name__)
        return (model(data[0]) - data[1]).square().mean()

    found = hdet.find_lr(model, optimizer, data, loss, total_steps=100)
    ensemble = hdet.Ensemble(
        optimizer, model=model, explore=[hdet.LearningRate(0.0)], sync_every=5, records=hdet.Records()
    )

    def spoil(step):
        if step == 2 and rank == 1:
            with torch.no_grad():
                net.b2.mul_(1.2)

    told = message_of(
        hdet.ReplicasDifferError, lambda: train(ensemble, model, optimizer, rank, range(5), spoil)
    )
    return found.lr, seen, told


def test_a_compiled_ddp_model_is_searched_and_named_as_the_one_inside():
    (lr, seen, told), (other, _, _) = run_replicas(_compiled, 2)
    assert lr == other and seen == {"Net"}
    assert "'b2' by" in told


# --- refused by name ------------------------------------------------------------------------------


def stand_in(base: type, name: str, module: str) -> type:
    return type(name, (base,), {"__module__": module})


def refused_by_both(optimizer: Optimizer, model: nn.Module, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        hdet.Ensemble(optimizer, model=model)
    with pytest.raises(TypeError, match=words):
        hdet.find_lr(model, optimizer, [], lambda m, b: m(b), total_steps=100)


@pytest.mark.parametrize("name", ["OSS", "BF16_Optimizer", "DeepSpeedZeroOptimizer_Stage3"])
def test_a_sharded_optimizer_that_is_not_known_is_refused(name: str) -> None:
    net = Net()
    optimizer = stand_in(AsOptim, name, "somewhere")(SGD(net.parameters(), lr=0.1))
    refused_by_both(optimizer, net, f"must be one that hdet knows, got a {name}: ")


def test_torchft_is_refused() -> None:
    net = Net()
    plain = SGD(net.parameters(), lr=0.1)
    words = "must not be torchft's, got a {}: each of its replica groups sees one replica alone"
    wrapper = stand_in(AsOptim, "OptimizerWrapper", "torchft.optim")(plain)
    refused_by_both(wrapper, net, "optimizer " + words.format("OptimizerWrapper"))
    theirs = stand_in(Net, "DistributedDataParallel", "torchft.ddp")()
    optimizer = SGD(theirs.parameters(), lr=0.1)
    refused_by_both(optimizer, theirs, "model " + words.format("DistributedDataParallel"))


def test_a_schedule_of_timm_is_refused() -> None:
    class CosineLRScheduler:
        def step(self, epoch: int, metric: Any = None) -> None: ...
        def step_update(self, num_updates: int, metric: Any = None) -> None: ...

    CosineLRScheduler.__module__ = "timm.scheduler.cosine_lr"
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for schedule in (CosineLRScheduler(), AcceleratedScheduler(CosineLRScheduler())):
        with pytest.raises(TypeError, match=r"got timm's CosineLRScheduler, .*: use a torch LRScheduler"):
            hdet.Ensemble(optimizer, scheduler=schedule)  # pyright: ignore[reportArgumentType]

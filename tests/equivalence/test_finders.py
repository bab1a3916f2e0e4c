"""Both finders, on virtual replicas and on real gloo ranks, against the readable reference."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import hdet
from hdet.core import reference, reference_finders
from hdet.core.shape import one_cycle
from tests.helpers.models import Net, batch
from tests.helpers.replicas import run_replicas

S, PEAK = 160, 0.004
SCOUT = hdet.Scout(min_steps=10, fraction=0.1, span=30, max_moves=0)
ANCHORED = hdet.AnchoredController(max_rise=1e9)  # the reference has no gate


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return (model(data[0]) - data[1]).square().mean()


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=PEAK, momentum=0.9)
    return torch.optim.Adam(groups, lr=PEAK)


def plan(step: int) -> float:
    return one_cycle(step, S)


def refer(kind: str, num_replicas: int, scout, controller, data=batch) -> reference_finders.Found:
    net = Net()

    def with_weights(theta: list[Tensor], examples: tuple[Tensor, Tensor]) -> Tensor:
        return torch.func.functional_call(
            _Loss(net), dict(zip(("net.w1", "net.b1", "net.w2", "net.b2"), theta, strict=True)), (examples,)
        )

    def gradient(theta: list[Tensor], replica: int, step: int) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in theta]
        return torch.autograd.grad(with_weights(leaves, data(replica, step)), leaves)

    return reference_finders.train(
        theta=[p.detach().clone() for p in net.parameters()],
        gradient=gradient,
        loss=lambda theta, replica, step: with_weights(theta, data(replica, step)).item(),
        score=lambda theta: with_weights(theta, batch(0, 9999)).item(),
        update=reference.sgd(0.9) if kind == "sgd" else reference.adam(),
        inner=lambda a, b: (a * b).sum().item() if isinstance(b, Tensor) else 0.0,
        peak=PEAK,
        plan=plan,
        num_replicas=num_replicas,
        total_steps=S,
        scout=scout,
        controller=controller,
        is_adaptive=kind == "adam",
        group_of=[0, 0, 1, 1],
    )


class _Loss(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, data: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(self.net, data)


class Virtual:
    """N replicas in this process."""

    def __init__(self, kind: str, count: int, scout, controller, *, data=batch, **settings) -> None:
        self.model, self.data = Net(), data
        optimizer = make_optimizer(kind, self.model)
        self.count = count
        self.records = hdet.Records()
        settings.setdefault("explore", [hdet.LearningRate(0.0)])
        self.ensemble = hdet.VirtualEnsemble(
            self.model,
            optimizer,
            loss_of,
            num_replicas=count,
            probe=lambda model: loss_of(model, batch(0, 9999)),
            scheduler=LambdaLR(optimizer, plan),
            total_steps=S,
            sync_every=10,
            scout=scout,
            controller=controller,
            records=self.records,
            **settings,
        )
        self.engine = self.ensemble.engine
        self.converge = self.engine.converge

    def step(self) -> None:
        step = self.engine.num_steps
        self.ensemble.step([self.data(r, step) for r in range(self.count)])

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save(self.ensemble.state_dict(), file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        self.ensemble.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))


class Rank:
    """One replica of a process group."""

    def __init__(self, kind: str, rank: int, scout, controller, *, data=batch, **settings) -> None:
        self.model, self.rank, self.data = Net(), rank, data
        self.wrapped = DistributedDataParallel(self.model)
        self.optimizer = make_optimizer(kind, self.model)
        settings.setdefault("explore", [hdet.LearningRate(0.0)])
        settings.setdefault("probe", lambda: loss_of(self.model, batch(0, 9999)))
        self.records = hdet.Records()
        self.engine = hdet.Ensemble(
            self.optimizer,
            model=self.wrapped,
            scheduler=LambdaLR(self.optimizer, plan),
            total_steps=S,
            sync_every=10,
            scout=scout,
            controller=controller,
            records=self.records,
            **settings,
        )
        self.converge = self.engine.converge

    def step(self) -> None:
        loss = loss_of(self.wrapped, self.data(self.rank, self.engine.num_steps))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.engine.step(loss)

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = (self.model, self.optimizer, self.engine)
        torch.save([part.state_dict() for part in parts], file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for part, state in zip((self.model, self.optimizer, self.engine), states, strict=True):
            part.load_state_dict(state)


def train(trainer: Virtual | Rank, until: int = S) -> tuple[list[list[float]], list[Tensor]]:
    """The learning rates of every step, and the weights."""
    lrs = []
    while trainer.engine.num_steps < until:
        lrs.append([group["lr"] for group in trainer.engine.optimizer.param_groups])
        trainer.step()
    trainer.converge()
    return lrs, [p.detach().clone() for p in trainer.model.parameters()]


def assert_same(lrs: list[list[float]], others: list[list[float]], rtol: float = 1e-9) -> None:
    mine, theirs = (torch.tensor(values, dtype=torch.float64) for values in (lrs, others))
    torch.testing.assert_close(mine, theirs, rtol=rtol, atol=0.0)


CASES = [
    pytest.param(SCOUT, None, id="scout"),
    pytest.param(None, ANCHORED, id="anchored"),
    pytest.param(SCOUT, ANCHORED, id="both"),
]


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize(("scout", "controller"), CASES)
@pytest.mark.parametrize("join_equal", [False, True])
def test_virtual_finders_equal_the_reference(kind, scout, controller, join_equal):
    expected = refer(kind, 4, scout, controller)
    trainer = Virtual(kind, 4, scout, controller, join_equal=join_equal)
    lrs, weights = train(trainer)
    run = len(expected.lrs)
    assert_same(lrs[-run:], expected.lrs)
    for mine, theirs in zip(weights, expected.theta, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)
    if controller is not None:
        assert expected.log_factors[-1] != [0.0, 0.0]  # the test can fail
    if scout is not None:
        assert trainer.records[-1].correction["lr.0"] != 1.0


@pytest.mark.parametrize(("kind", "peak"), [("adam", 0.3), ("sgd", 0.2)])
def test_where_control_times_are_far_apart_only_some_steps_are_measured(kind, peak, monkeypatch):
    monkeypatch.setitem(globals(), "PEAK", peak)
    if_all_were = refer(kind, 4, None, ANCHORED)
    monkeypatch.setattr("hdet.core.anchored._MEASURED_PER_GAP", 2)  # as if the run were eight times as long
    expected = refer(kind, 4, None, ANCHORED)
    trainer = Virtual(kind, 4, None, ANCHORED)
    steering, num_measured = trainer.engine.steering, 0
    while trainer.engine.num_steps < S:
        num_measured += steering.is_measuring
        lrs = [group["lr"] for group in trainer.engine.optimizer.param_groups]
        assert lrs == pytest.approx(expected.lrs[trainer.engine.num_steps], rel=1e-9)
        trainer.step()
    assert expected.lrs[-1] != pytest.approx(if_all_were.lrs[-1], rel=1e-3)
    assert 0.5 * S < num_measured < 0.9 * S


def _shifted(replica: int, step: int) -> tuple[Tensor, Tensor]:
    """The targets come nearer after a few steps and jump away at step 100, and the loss with them."""
    x, y = batch(replica, step)
    return x, y + (4.0 if step < 4 or step >= 100 else 0.0)


def _with_a_jump(rank):
    trainer = Rank("adam", rank, None, ANCHORED, data=_shifted)
    return train(trainer)[0], trainer.engine.steering.memory.num_brakes


def test_where_the_loss_jumps_up_all_go_back_to_the_plan():
    expected = refer("adam", 2, None, ANCHORED, data=_shifted)
    trainer = Virtual("adam", 2, None, ANCHORED, data=_shifted)
    lrs, _ = train(trainer)
    brakes = [record.num_brakes for record in trainer.records]
    assert brakes[9] == 0
    assert 1 <= brakes[10] <= brakes[-1] <= 3  # a second one takes a new high
    for mine, num_brakes in ((lrs, brakes[-1]), *run_replicas(_with_a_jump, 2)):
        assert_same(mine, expected.lrs)
        assert num_brakes == brakes[-1]
    assert min(expected.log_factors[99]) > 0
    assert max(expected.log_factors[109]) <= 0
    assert max(map(max, expected.log_factors[110:])) <= max(expected.log_factors[99]) / 2


def _on_rank(rank, kind, scout, controller):
    trainer = Rank(kind, rank, scout, controller)
    lrs, weights = train(trainer)
    return lrs, weights, [r.scout for r in trainer.records if r.scout]


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize(("scout", "controller"), CASES)
def test_finders_on_gloo_ranks_equal_the_reference(kind, scout, controller):
    expected = refer(kind, 2, scout, controller)
    for lrs, weights, _ in run_replicas(_on_rank, 2, kind, scout, controller):
        assert_same(lrs[-len(expected.lrs) :], expected.lrs)
        for mine, theirs in zip(weights, expected.theta, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)


def test_records_tell_the_learning_rate_of_every_step():
    trainer = Virtual("adam", 4, None, ANCHORED)
    lrs, _ = train(trainer)
    told = []
    for record in trainer.records:
        trace = record.base_trace["lr.0"]
        told += trace * record.num_steps if len(trace) == 1 else trace
    first = [lr for lr, _ in lrs]
    assert told == pytest.approx(first, rel=1e-12)
    assert hdet.export_schedule(trainer.records)["lr.0"][:S] == pytest.approx(first, rel=1e-12)


@pytest.mark.parametrize("stop", [98, 101, 104, 120])
def test_a_run_that_brakes_resumes_to_the_bit(stop, monkeypatch):
    monkeypatch.setattr("hdet.core.anchored._MEASURED_PER_GAP", 2)
    whole = Virtual("adam", 2, None, ANCHORED, data=_shifted)
    expected, _ = train(whole)
    assert whole.engine.steering.memory.num_brakes
    first = Virtual("adam", 2, None, ANCHORED, data=_shifted)
    train(first, until=stop)
    second = Virtual("adam", 2, None, ANCHORED, data=_shifted)
    second.load(first.save())
    assert train(second)[0] == expected[stop:]
    assert second.engine.steering.memory.watch == whole.engine.steering.memory.watch


STOPS = [0, 4, 5, 17, 25, 45, 60, 110]


def _resumed_on_rank(rank, kind, controller, stop):
    whole = train(Rank(kind, rank, SCOUT, controller))
    first = Rank(kind, rank, SCOUT, controller)
    train(first, until=stop)
    second = Rank(kind, rank, SCOUT, controller)
    second.load(first.save())
    return whole[1], train(second)[1], second.engine.num_steps


@pytest.mark.parametrize("stop", STOPS)
def test_virtual_finders_resume(stop):
    whole = Virtual("adam", 4, SCOUT, ANCHORED, join_equal=True)
    _, expected = train(whole)
    first = Virtual("adam", 4, SCOUT, ANCHORED, join_equal=True)
    train(first, until=stop)
    fans_begin = [0, *(record.step for record in whole.records if record.scout)]
    assert fans_begin == [0, 5, 10, 25, 40]
    second = Virtual("adam", 4, SCOUT, ANCHORED, join_equal=True)
    second.load(first.save())
    _, weights = train(second)
    if stop < fans_begin[-1] and stop not in fans_begin:
        # The fan that was begun is begun again, on later batches: another choice, but a whole run.
        assert second.records[-1].step == S
        assert all(torch.isfinite(w).all() for w in weights)
        assert not all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    else:
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_copies_in_bfloat16_follow_the_exact_ones_and_resume_to_the_bit():
    half = hdet.AnchoredController(max_rise=1e9, copy_in_bfloat16=True)
    exact, rounded = Virtual("adam", 4, None, ANCHORED), Virtual("adam", 4, None, half)
    lrs, (mine, _) = train(exact)[0], train(rounded)
    assert_same(mine, lrs, rtol=0.05)
    pairs = zip(exact.engine.steering.anchor.average, rounded.engine.steering.anchor.average, strict=True)
    for (true,), (kept,) in pairs:
        assert kept.dtype == torch.bfloat16
        moved = (true - kept.double()).abs()
        assert 0 < moved.max() < 0.03 * true.abs().max()
        assert (true - kept.double()).mean().abs() < 0.003 * true.abs().max()  # no drift to one side
    whole = Virtual("adam", 4, None, half)
    train(whole, until=70)
    resumed = Virtual("adam", 4, None, half)
    resumed.load(whole.save())
    assert train(resumed)[0] == mine[70:]
    last = zip(resumed.engine.steering.anchor.average, rounded.engine.steering.anchor.average, strict=True)
    assert all(torch.equal(a, b) for (a,), (b,) in last)


def test_finders_resume_on_ranks_to_the_bit():
    for whole, resumed, last in run_replicas(_resumed_on_rank, 2, "adam", ANCHORED, 110):
        assert last == S
        assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def _resumed_from_the_first_rank(rank, stop):
    spread = [hdet.LearningRate(0.2)]
    whole = train(Rank("adam", rank, None, ANCHORED, explore=spread))[1]
    first = Rank("adam", rank, None, ANCHORED, explore=spread)
    train(first, until=stop)
    between = first.engine.steering.anchor.num_summed
    saved = [first.save()]
    torch.distributed.broadcast_object_list(saved, src=0)
    second = Rank("adam", rank, None, ANCHORED, explore=spread)
    second.load(saved[0])
    return whole, train(second)[1], between


def test_replicas_that_differ_resume_from_one_checkpoint_to_the_bit():
    found = run_replicas(_resumed_from_the_first_rank, 2, 120)
    for whole, resumed, num_summed in found:
        assert num_summed > 0  # the stop lies between two control times
        assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_a_scout_that_was_begun_on_ranks_is_begun_again():
    for _, resumed, last in run_replicas(_resumed_on_rank, 2, "adam", None, 17):
        assert last == S
        assert all(torch.isfinite(w).all() for w in resumed)


def _restores(rank):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = [x.clone() for x in model.state_dict().values()]
    generator = torch.random.get_rng_state()
    ensemble = hdet.Ensemble(
        optimizer, model=wrapped, total_steps=400, sync_every=10, scout=hdet.Scout(min_steps=5, fraction=0.05)
    )
    grads_differ = False
    while ensemble.is_scouting:
        wrapped(torch.randn(4, 3)).square().mean().backward()
        both = [torch.zeros_like(model[0].weight.grad) for _ in range(2)]
        torch.distributed.all_gather(both, model[0].weight.grad.contiguous())
        grads_differ |= not torch.equal(*both)
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(torch.tensor(float(ensemble.num_steps % 7)))
    same_tensors = all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    same_generator = torch.equal(generator, torch.random.get_rng_state())
    wrapped(torch.ones(4, 3) * rank).square().mean().backward()
    both = [torch.zeros_like(model[0].weight.grad) for _ in range(2)]
    torch.distributed.all_gather(both, model[0].weight.grad.contiguous())
    return same_tensors, same_generator, dict(optimizer.state) == {}, grads_differ, torch.equal(*both)


def test_the_scout_puts_everything_back_and_shares_gradients_again():
    for result in run_replicas(_restores, 2):
        assert result == (True, True, True, True, True)


@pytest.mark.parametrize("factor", [0.001, 0.01])
def test_the_start_hardly_matters(factor, monkeypatch):
    monkeypatch.setitem(globals(), "PEAK", PEAK * factor)
    losses = []
    for scout in (hdet.Scout(min_steps=15, fraction=0.2), None):
        trainer = Virtual("adam", 8, scout, None)
        train(trainer)
        with torch.no_grad():
            held_out = [loss_of(trainer.model, batch(0, 9000 + i)).item() for i in range(20)]
        losses.append(sum(held_out) / len(held_out))
    with_scout, plain = losses
    assert with_scout < 0.4
    assert plain > 1


def test_the_gate_closes_where_the_probe_keeps_rising():
    scores = iter([1.0, 0.5, 0.6, 0.7, 0.8, 0.9, *[1.0] * 20])
    trainer = Virtual("adam", 2, None, hdet.AnchoredController(), join_equal=True)
    trainer.ensemble.replicas.probe = lambda model: next(scores)
    train(trainer)
    assert next(r.step for r in trainer.records if r.gate) == 50
    assert trainer.records[-1].gate == "the loss on the probe keeps above its lowest"
    assert [len(r.probes) for r in trainer.records[:6]] == [2, 2, 2, 2, 2, 0]  # nobody looks any more


@pytest.mark.parametrize("make", [Virtual, Rank])
def test_where_it_is_known_when_data_repeats_the_probe_is_left_alone(make):
    where = 2 if make is Virtual else 0
    (calls,) = run_replicas(_count_probes, 1, where) if make is Rank else [_count_probes(0, where)]
    assert calls == {None: 10, math.inf: 0, 50: 0}


def _count_probes(rank, count):
    found = {}
    for limit in (None, math.inf, 50):
        controller, seen = hdet.AnchoredController(repeats_after=limit), []
        if count:
            trainer = Virtual("adam", count, None, controller, join_equal=True)
            trainer.ensemble.replicas.probe = lambda model, seen=seen: seen.append(1) or 1.0
        else:
            trainer = Rank("adam", rank, None, controller, probe=lambda seen=seen: seen.append(1) or 1.0)
        for _ in range(100):
            trainer.step()
        found[limit] = len(seen)
    return found


def test_without_a_probe_the_last_training_losses_decide():
    model = Net()
    optimizer = make_optimizer("adam", model)
    records = hdet.Records()
    ensemble = hdet.VirtualEnsemble(
        model,
        optimizer,
        loss_of,
        num_replicas=8,
        explore=[hdet.LearningRate(0.0)],
        total_steps=S,
        scout=SCOUT,
        records=records,
    )
    for step in range(S):
        ensemble.step([batch(r, step) for r in range(8)])
    decided = next(r.scout.decision for r in records if r.scout and r.scout.decision)
    assert math.isfinite(decided.factor)
    assert decided.factor > 1  # 0.004 is low for this problem


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_replicas_take_several_fans(count):
    trainer = Virtual("adam", count, hdet.Scout(min_steps=4, fraction=0.2), None)
    train(trainer)
    fans = [r.scout for r in trainer.records if r.scout]
    assert len(fans) >= 2 * math.ceil(6 / count)
    assert fans[-1].decision.factor > 1


def test_the_gate_holds_the_correction_and_says_why():
    repeating = hdet.AnchoredController(start=0.05, repeats_after=50)
    trainer = Virtual("adam", 2, None, repeating)
    train(trainer)
    assert trainer.records[0].gate == ""
    shut = [r for r in trainer.records if r.gate]
    assert shut[0].step == 50
    assert {r.gate for r in shut} == {"training data repeats"}
    assert len({r.correction["lr.0"] for r in shut[:-1]}) == 1
    assert shut[0].correction["lr.0"] != 1.0


def _one_cycle(rank, max_lr, scout, controller=None):
    model = Net()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {} if scout is None else {"model": wrapped, "scout": scout}
    scheduler = hdet.OneCycleAutoLR(optimizer, max_lr, total_steps=400, controller=controller, **settings)
    lrs = []
    for step in range(400):
        loss = loss_of(wrapped, batch(rank, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        lrs.append(optimizer.param_groups[0]["lr"])
    return lrs, loss_of(model, batch(0, 9999)).item()


def test_the_drop_in_scheduler_scouts_too():
    scout = hdet.Scout(fraction=0.2)
    (lrs, low), (others, _) = run_replicas(_one_cycle, 2, 1e-4, scout)
    assert lrs[250:] == others[250:]
    assert 30 < max(lrs[250:]) / 1e-4 < 3e4
    assert lrs[-1] < 1e-3 * max(lrs[250:])  # the schedule still ends with the last step
    (_, plain), _ = run_replicas(_one_cycle, 2, 1e-4, None)
    assert low < 0.5 * plain


def test_the_drop_in_scheduler_takes_the_anchored_controller():
    settings = (1e-3, None, hdet.AnchoredController(limit=3.0))
    (lrs, low), (others, _) = run_replicas(_one_cycle, 2, *settings)
    assert lrs == others
    (planned, plain), _ = run_replicas(_one_cycle, 2, 1e-3, None)
    assert lrs[:39] == planned[:39]  # it watches at first
    assert lrs[-2] == pytest.approx(3 * planned[-2])
    assert low < plain
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="enable_auto_lr must be False where a controller is given"):
        hdet.OneCycleAutoLR(
            optimizer,
            0.1,
            total_steps=9,
            enable_auto_lr=True,
            auto_lr_warmup_steps=1,
            controller=hdet.Controller(),
        )


def _skips(rank):
    """Rank one's gradient scaler skips a step of a trial."""
    model = Net()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ensemble = hdet.Ensemble(
        optimizer, model=wrapped, total_steps=400, sync_every=10, scout=hdet.Scout(min_steps=5, fraction=0.05)
    )
    for step in range(200):
        loss = loss_of(wrapped, batch(rank, step))
        optimizer.zero_grad()
        loss.backward()
        is_skipped = rank == 1 and step == 3
        if not is_skipped:
            optimizer.step()
        ensemble.step(loss, skipped=is_skipped)
    return ensemble.num_steps, ensemble.is_scouting


def test_a_replica_that_skips_a_step_of_a_trial_ends_it_with_the_others():
    assert run_replicas(_skips, 2) == [(200, False)] * 2


def test_a_scout_goes_on_with_another_number_of_replicas():
    first = Virtual("adam", 2, SCOUT, None)
    train(first, until=12)  # within the first of three fans of two
    second = Virtual("adam", 8, SCOUT, None)
    second.load(first.save())
    assert second.engine.is_scouting
    train(second)
    assert second.records[-1].step == S
    assert second.records[-1].correction["lr.0"] != 1.0


@pytest.mark.parametrize("settings", [{"scout": SCOUT}, {"controller": hdet.AnchoredController()}])
def test_a_checkpoint_of_plain_one_cycle_is_taken_over_with_its_weights(settings):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=400)
    for _ in range(100):
        optimizer.step()
        plain.step()
    scheduler = hdet.OneCycleAutoLR(optimizer, 0.1, total_steps=400, model=model, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)  # what the checkpoint brings
    scheduler.load_state_dict(plain.state_dict())
    assert not scheduler.ensemble.is_scouting
    for step in range(60):
        loss = loss_of(model, batch(0, step))
        optimizer.zero_grad()
        loss.backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        scheduler.step(loss)
        moved = max((p - b).abs().max() for p, b in zip(model.parameters(), before, strict=True))
        assert moved < 0.4  # a step, and nothing put back
    if "controller" in settings:
        assert all((x0 == 0.5).all() for group in scheduler.ensemble.steering.anchor.start for x0 in group)


def test_errors_say_what_is_missing():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="total_steps must be at least 80 for this scout with 8 replicas"):
        hdet.VirtualEnsemble(model, optimizer, loss_of, num_replicas=8, scout=hdet.Scout(), total_steps=50)
    with pytest.raises(ValueError, match="steps must be given to Scout where total_steps is not known"):
        hdet.VirtualEnsemble(model, optimizer, loss_of, num_replicas=8, scout=hdet.Scout())
    with pytest.raises(TypeError, match=r"scout must be an hdet\.Scout or None, got True"):
        hdet.Ensemble(optimizer, scout=True, total_steps=500)
    with pytest.raises(ValueError, match="total_steps must be given for an AnchoredController"):
        hdet.Ensemble(optimizer, controller=hdet.AnchoredController())

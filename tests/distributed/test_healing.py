"""Replicas that ought to be equal and are not get what the others hold."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.helpers.models import Net, batch
from tests.helpers.ranks import message_of, of_both, train
from tests.helpers.replicas import run_replicas

SYNC_EVERY, LAST = 5, 30


class Run:
    """A model with a frozen layer and statistics, trained with shared gradients at spread 0."""

    def __init__(self, rank: int, **settings: Any) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.net = nn.Sequential(
            nn.Linear(3, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 8).requires_grad_(False),
            nn.Tanh(),
            nn.Linear(8, 2),
        ).double()
        self.model = DistributedDataParallel(self.net)
        self.model.register_comm_hook(None, hdet.finite_mean_hook)
        self.optimizer = torch.optim.AdamW([p for p in self.net.parameters() if p.requires_grad], lr=0.01)
        self.records = hdet.Records()
        settings = {"total_steps": LAST, "sync_every": SYNC_EVERY, "records": self.records} | settings
        self.ensemble = hdet.AutoLR(self.optimizer, model=self.model, **settings)
        self.message, self.told = "", []

    @torch.no_grad()
    def change(self, how: str) -> None:
        for tensor in self.net.parameters():
            if how == "nan":
                tensor.fill_(torch.nan)
            elif how == "scaled":
                tensor.mul_(1e4)
            elif how == "rounding":
                tensor.mul_(1 + 1e-12)
        if how == "nan":
            self.optimizer.state.clear()

    def train(self, faults: dict[int, str], *, after_the_step: bool = True, until: int = LAST) -> None:
        """``faults`` says what happens at which step, after the optimizer or before the forward pass."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                for step in range(self.ensemble.num_steps, until):
                    if step in faults and not after_the_step:
                        self.change(faults[step])
                    x, y = batch(self.rank, step)
                    loss = (self.model(x) - y).square().mean()
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    if step in faults and after_the_step:
                        self.change(faults[step])
                    self.ensemble.step(loss)
            except hdet.HdetError as error:
                self.message = f"{type(error).__name__}: {error}"
        self.told += [str(w.message) for w in caught if issubclass(w.category, hdet.HdetWarning)]

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, frozen ones too, and moments; the statistics of a batch differ between ranks."""
        moments = {
            f"{i} {name}": value
            for i, state in self.optimizer.state_dict()["state"].items()
            for name, value in state.items()
        }
        return {name: p.detach() for name, p in self.net.named_parameters()} | moments

    def answer(self) -> dict[str, Any]:
        return {
            "state": self.state(),
            "buffers": {name: b.clone() for name, b in self.net.named_buffers()},
            "excluded": {r.step: r.excluded for r in self.records if r.excluded},
            "losses": [r.losses for r in self.records],
            "told": self.told,
            "message": self.message,
        }


def _run(rank: int, bad: int, faults: dict[int, str], after_the_step: bool = True) -> dict[str, Any]:
    run = Run(rank)
    run.train(faults if rank == bad else {}, after_the_step=after_the_step)
    return run.answer()


def assert_equal_and_finite(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["message"] == ""
        assert result["state"].keys() == results[0]["state"].keys()
        for name, value in result["state"].items():
            assert torch.equal(value, results[0]["state"][name]), name
            assert torch.isfinite(value).all(), name
        assert all(torch.isfinite(value).all() for value in result["buffers"].values())


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_replica_that_is_not_finite_is_healed(bad: int, world_size: int) -> None:
    results = run_replicas(_run, world_size, bad, {12: "nan"}, False)
    assert_equal_and_finite(results)
    assert results[0]["excluded"] == {15: {bad: "parameters are not finite"}}
    assert len(results[0]["told"]) == 1
    assert (
        f"at step 15 all replicas must hold the same parameters, but the parameters of replica {bad} are "
        in (results[0]["told"][0])
    )
    assert results[1]["told"] == []


@pytest.mark.parametrize("bad", [0, 2])
def test_the_majority_heals_a_replica_that_differs(bad: int) -> None:
    results = run_replicas(_run, 3, bad, {12: "scaled"}, False)
    assert_equal_and_finite(results)
    assert results[0]["excluded"] == {15: {bad: "parameters differ from the other replicas'"}}
    assert len(results[0]["told"]) == 1
    assert (
        f"at step 15 all replicas must hold the same parameters, but those of replica {bad} differ"
        in (results[0]["told"][0])
    )


@pytest.mark.parametrize("how", ["nan", "scaled"])
def test_a_fault_at_a_sync_leaves_no_trace(how: str) -> None:
    undisturbed = run_replicas(_run, 3, 1, {})
    healed = run_replicas(_run, 3, 1, {14: how})
    assert_equal_and_finite(healed)
    assert list(healed[0]["excluded"]) == [15]
    for name, value in undisturbed[0]["state"].items():
        assert torch.equal(value, healed[0]["state"][name]), name


def test_without_a_majority_nothing_is_guessed() -> None:
    for result in run_replicas(_run, 2, 1, {12: "scaled"}):
        assert result["message"].startswith("ReplicasDifferError: at step 15 all replicas must hold the same")


def test_a_replica_that_parts_at_every_sync_has_a_lasting_cause() -> None:
    for result in run_replicas(_run, 3, 1, {4: "scaled", 9: "nan", 14: "scaled"}):
        assert result["message"].startswith("ReplicasDifferError: at step 15 replica 1 must hold the same")
        assert "at 3 syncs in a row" in result["message"]


def test_a_pause_between_faults_is_no_lasting_cause() -> None:
    results = run_replicas(_run, 3, 1, {4: "nan", 9: "nan", 19: "nan", 24: "nan"})
    assert_equal_and_finite(results)
    assert list(results[0]["excluded"]) == [5, 10, 20, 25]


def test_rounding_is_made_equal_as_often_as_it_comes() -> None:
    results = run_replicas(_run, 3, 1, dict.fromkeys(range(4, LAST, SYNC_EVERY), "rounding"))
    assert_equal_and_finite(results)
    assert results[0]["excluded"] == {}
    assert len(results[0]["told"]) == 6 and all("differ by rounding" in text for text in results[0]["told"])


def _converge_in_a_round(rank: int) -> dict[str, Any]:
    run = Run(rank)
    run.train({11: "scaled"} if rank == 1 else {}, after_the_step=False, until=13)
    run.ensemble.converge()
    run.train({})
    return run.answer()


def test_losses_of_lost_parameters_are_forgotten() -> None:
    results = run_replicas(_converge_in_a_round, 3)
    assert_equal_and_finite(results)
    assert list(results[0]["excluded"]) == [13]
    in_the_round, at_its_end = results[0]["losses"][2:4]
    assert in_the_round[1] > 1e4 > at_its_end[1]


def _same_error(rank: int, act: str) -> str:
    """Without the hook, one NaN in a gradient reaches all."""
    net = nn.Linear(3, 2).double()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    settings: dict[str, Any] = (
        {} if act == "save, no rounds" else {"controllers": [hdet.Guard()], "total_steps": 30}
    )
    ensemble = hdet.Ensemble(
        optimizer, model=model, explore=[hdet.LearningRate(0.0)], sync_every=5, **settings
    )
    try:
        for step in range(5 if act == "sync" else 4):
            x, y = batch(rank, step)
            loss = (model(x) - y).square().mean()
            if step == 3 and rank == 1:
                loss = loss * torch.nan
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ensemble.step(loss)
        ensemble.converge() if act == "converge" else ensemble.state_dict()
    except hdet.NotFiniteError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize("act", ["sync", "converge", "save, no rounds"])
def test_a_nan_that_reaches_all_stops_all_alike(act: str) -> None:
    first, second = run_replicas(_same_error, 2, act)
    assert first == second
    assert first.startswith("NotFiniteError: " if act.startswith("save") else "AllReplicasFailedError: ")


def _a_group_of_the_world(rank: int) -> float:
    """Ranks 1 to 3 are replicas 0 to 2: the donor is named by its place in the group."""
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        return 5.0
    assert isinstance(group, dist.ProcessGroup)
    parameter = nn.Parameter(torch.full((2,), 5.0))
    optimizer = torch.optim.SGD([parameter], lr=1e-30)
    ensemble = hdet.AutoLR(optimizer, total_steps=10, sync_every=1, replicas=group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank == 1:
            parameter.data.fill_(7.0)
        optimizer.step()
        ensemble.step(1.0)
    return parameter[1].item()


def test_healing_within_a_process_group() -> None:
    assert run_replicas(_a_group_of_the_world, 4) == [5.0] * 4


# --- parameters of any kind, and an ensemble without a recipe ----------------------------------------


def build(rank, **settings):
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    settings = {
        "explore": [hdet.LearningRate(0.0)],
        "sync_every": 5,
        "records": hdet.Records(),
        "total_steps": 40,
    } | settings
    return net, model, optimizer, hdet.Ensemble(optimizer, model=model, **settings)


def _nan_in_a_gradient(rank, how):
    net, model, optimizer, ensemble = build(rank, average_tail=0.5)

    def spoil(step):
        if step == 7 and rank == 1:
            with torch.no_grad():
                net.w1[0, 0] = torch.nan  # its loss is NaN, and DDP gives the NaN to all

    if how == "sync":
        return message_of(
            hdet.AllReplicasFailedError, lambda: train(ensemble, model, optimizer, rank, range(10), spoil)
        )
    train(ensemble, model, optimizer, rank, range(9), spoil)
    act = {"save": ensemble.state_dict, "converge": ensemble.converge, "finish": ensemble.finish}[how]
    return message_of(hdet.NotFiniteError, act)


@pytest.mark.parametrize("how", ["sync", "save", "converge", "finish"])
def test_nan_is_found_where_nothing_is_explored(how):
    for message in run_replicas(_nan_in_a_gradient, 2, how):
        assert "not finite" in message
        assert "resume from the last checkpoint" in message


def _one_bad_replica(rank):
    records = hdet.Records()
    net, model, optimizer, ensemble = build(rank, records=records)
    train(ensemble, model, optimizer, rank, range(4))
    if rank == 1:  # a fault of this rank alone, after its last step of the round
        optimizer.register_step_post_hook(
            lambda *_: net.w1.data.fill_(torch.nan) if ensemble.num_steps == 4 else None
        )
    train(ensemble, model, optimizer, rank, range(4, 20))
    weights = [torch.equal(*of_both(p)) for p in net.parameters()]
    moments = [torch.equal(*of_both(optimizer.state[p]["exp_avg"])) for p in net.parameters()]
    return weights, moments, [record.excluded for record in records]


def test_one_bad_replica_is_healed_where_nothing_is_explored():
    (weights, moments, excluded), _ = run_replicas(_one_bad_replica, 2)
    assert all(weights) and all(moments)
    assert excluded == [{1: "parameters are not finite"}, {}, {}, {}]


def _drifting(rank, size):
    net, model, optimizer, ensemble = build(rank)

    def spoil(step):
        if step == 2 and rank == 1:
            with torch.no_grad():
                net.b2.mul_(1 + size)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        message = message_of(
            hdet.ReplicasDifferError, lambda: train(ensemble, model, optimizer, rank, range(5), spoil)
        )
    told = [str(w.message) for w in caught if issubclass(w.category, hdet.HdetWarning)]
    return message, told, all(torch.equal(*of_both(p)) for p in net.parameters())


def test_replicas_that_drift_apart_are_found_and_named():
    for message, _, _ in run_replicas(_drifting, 2, 0.2):
        assert "at step 5 all replicas must hold the same parameters" in message
        assert "'b2' by" in message


def test_rounding_is_averaged_away_with_a_word():
    (message, told, are_equal), (_, silent, _) = run_replicas(_drifting, 2, 1e-12)
    assert message == "nothing was raised"
    assert len(told) == 1 and "differ by rounding" in told[0] and not silent
    assert are_equal


def _two_optimizers(rank):
    """hdet sees one of them; the other has another learning rate on every rank."""
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam([net.w1, net.b1], lr=0.01)
    other = torch.optim.Adam([net.w2, net.b2], lr=0.01 * (1 + rank))
    ensemble = hdet.Ensemble(
        optimizer,
        model=model,
        explore=[hdet.LearningRate(0.0)],
        sync_every=10,
        controllers=[hdet.Guard()],
        total_steps=400,
    )

    def run():
        for step in range(200):
            x, y = batch(rank, step)
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad(), other.zero_grad()
            loss.backward()
            optimizer.step(), other.step()
            ensemble.step(loss)

    return message_of(hdet.ReplicasDifferError, run)


def test_a_second_optimizer_that_parts_the_replicas_is_found():
    for message in run_replicas(_two_optimizers, 2):
        assert "give hdet the optimizer of all trained parameters" in message


def _nan_in_a_batch_of_rank_zero(rank):
    told = {"sync_every": SYNC_EVERY, "spread": 0.1}
    probe = hdet.Probe([batch(9, 0)], lambda model, data: (model(data[0]) - data[1]).square().mean())
    run = Run(rank, probe=probe, **told)
    run.train({}, until=12)
    x, y = batch(rank, 12)
    x = x * torch.nan if rank == 0 else x
    loss = (run.model(x) - y).square().mean()
    run.optimizer.zero_grad()
    loss.backward()
    run.optimizer.step()
    run.ensemble.step(loss)
    run.train({})
    return run.answer()


def test_a_nan_that_batchnorm_of_rank_zero_saw_does_not_spoil_the_scores_of_all():
    results = run_replicas(_nan_in_a_batch_of_rank_zero, 2)
    assert_equal_and_finite(results)
    assert results[0]["excluded"] == {}
    assert len(results[0]["losses"]) == LAST // SYNC_EVERY

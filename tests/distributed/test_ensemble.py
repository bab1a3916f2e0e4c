"""The ensemble on real replicas: agreement, collinearity, faults, saving and resuming."""

from __future__ import annotations

import io
import logging
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import hdet
from hdet.round_record import ComparingRecord
from tests.helpers.models import Net, batch, make_optimizer, parameter_groups, train_step
from tests.helpers.ranks import of_both, train
from tests.helpers.replicas import end_processes, run_replicas


class SharedGradients(nn.Module):
    """Averages gradients over ranks, tensor by tensor, in a fixed order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(self._average)

    @staticmethod
    def _average(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# --- spread 0 is plain DDP --------------------------------------------------------------------------


def run_spread_zero(rank: int, use_hdet: bool, optimizer_name: str) -> dict[str, Any]:
    torch.manual_seed(5 + rank)
    model = DistributedDataParallel(Net())
    optimizer = make_optimizer(optimizer_name, parameter_groups(model, 4))
    settings: dict[str, Any] = {"max_lr": [0.02, 0.01, 0.03, 0.015], "total_steps": 20}
    if use_hdet:
        scheduler: Any = hdet.OneCycleAutoLR(
            optimizer, **settings, model_sync_interval=5, records=hdet.Records() if rank == 0 else None
        )
    else:
        scheduler = OneCycleLR(optimizer, **settings)
    seen = []
    for t in range(20):
        x, y = batch(rank, t)
        x = nn.functional.dropout(x, 0.2)  # draws from the global generator
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss) if use_hdet else scheduler.step()
        group_values = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        seen.append((scheduler.get_last_lr(), group_values))
    return {
        "seen": seen,
        "parameters": flat(model),
        "state": [torch.as_tensor(v) for s in optimizer.state_dict()["state"].values() for v in s.values()],
        "rng": torch.get_rng_state(),
    }


@pytest.mark.parametrize("optimizer_name", ["momentum", "adamw"])
def test_spread_zero_is_plain_ddp_to_the_bit(optimizer_name: str) -> None:
    plain = run_replicas(run_spread_zero, 2, False, optimizer_name)
    ours = run_replicas(run_spread_zero, 2, True, optimizer_name)
    for a, b in zip(plain, ours, strict=True):
        assert a["seen"] == b["seen"]
        assert torch.equal(a["parameters"], b["parameters"])
        assert torch.equal(a["rng"], b["rng"])
        assert all(torch.equal(x, y) for x, y in zip(a["state"], b["state"], strict=True))


# --- collinearity -----------------------------------------------------------------------------------


def run_one_round(rank: int, optimizer_name: str) -> dict[str, Any]:
    model = DistributedDataParallel(Net())
    optimizer = make_optimizer(optimizer_name, parameter_groups(model, 4))
    ensemble = hdet.Ensemble(optimizer, explore=[hdet.LearningRate(0.3)], sync_every=1000)
    start = [p.detach().clone() for p in model.parameters()]
    for t in range(10):
        ensemble.step(train_step(model, optimizer, rank, t))
    return {
        "displacement": [p.detach() - s for p, s in zip(model.parameters(), start, strict=True)],
        "multipliers": list(ensemble.multipliers.values()),
        "moments": [
            value
            for slots in optimizer.state_dict()["state"].values()
            for name, value in slots.items()
            if name != "step"
        ],
    }


@pytest.mark.parametrize("optimizer_name", ["sgd", "momentum", "adam"])
def test_shared_gradients_make_replicas_collinear(optimizer_name: str) -> None:
    """theta_r - mean = (rho_r - 1) x mean displacement, per group; optimizer moments stay identical."""
    results = run_replicas(run_one_round, 4, optimizer_name)
    for group in range(4):
        mean = sum(r["displacement"][group] for r in results) / 4
        assert torch.as_tensor(mean).abs().max() > 1e-3
        for r in results:
            expected = (r["multipliers"][group] - 1) * mean
            torch.testing.assert_close(r["displacement"][group] - mean, expected, rtol=1e-9, atol=1e-12)
    for r in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0]["moments"], r["moments"], strict=True))


def test_decoupled_decay_is_nearly_collinear() -> None:
    """AdamW decays each replica's own parameters: off by spread x (lr x decay x steps)."""
    results = run_replicas(run_one_round, 4, "adamw")
    bound = 0.3 * (0.1 * 0.1 * 10)
    for group in range(4):
        mean = sum(r["displacement"][group] for r in results) / 4
        for r in results:
            expected = (r["multipliers"][group] - 1) * mean
            error = (r["displacement"][group] - mean - expected).norm()
            assert 0 < error < bound * torch.as_tensor(mean).norm()


def run_mean(rank: int, spread: float) -> torch.Tensor:
    model = DistributedDataParallel(Net())
    optimizer = make_optimizer("momentum", parameter_groups(model, 1))
    ensemble = hdet.Ensemble(optimizer, explore=[hdet.LearningRate(spread)], sync_every=1)
    for t in range(20):
        ensemble.step(train_step(model, optimizer, rank, t))
    return flat(model)


def test_at_a_sync_every_step_the_mean_is_plain_ddp() -> None:
    plain = run_replicas(run_mean, 4, 0.0)
    spread = run_replicas(run_mean, 4, 0.5)
    torch.testing.assert_close(spread[0], plain[0], rtol=1e-12, atol=1e-14)


# --- agreement --------------------------------------------------------------------------------------


def build_differently(rank: int, what: str) -> tuple[str, str]:
    settings: dict[str, Any] = {"sync_every": 10}
    model = Net()
    if what == "sync_every":
        settings["sync_every"] = 10 + rank
    elif what == "explore":
        settings["explore"] = [hdet.LearningRate(0.1 * (rank + 1))]
    elif what == "controllers":
        settings["controllers"] = [hdet.Controller(momentum=0.1 * rank)]
    elif what == "seed":
        settings["seed"] = rank
    elif what == "parameters" and rank:
        model.extra = nn.Parameter(torch.zeros(3))
    try:
        hdet.Ensemble(torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    except hdet.ConfigurationMismatchError as error:
        return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.parametrize("what", ["sync_every", "explore", "controllers", "seed", "parameters"])
def test_different_settings_are_named_on_every_rank(what: str) -> None:
    results = run_replicas(build_differently, 4, what)
    names, texts = zip(*results, strict=True)
    assert set(names) == {"ConfigurationMismatchError"}
    assert len(set(texts)) == 1
    assert f"these differ: {what} (replica 0: " in texts[0] and "replica 3: " in texts[0]


def different_bases(rank: int) -> str:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + rank * step)
    ensemble = hdet.Ensemble(optimizer, scheduler=scheduler, sync_every=1)
    try:
        for _ in range(2):
            optimizer.step()
            ensemble.step(1.0)
    except hdet.ConfigurationMismatchError as error:
        return str(error)
    return ""


def test_schedules_that_differ_are_found_at_the_next_sync() -> None:
    for text in run_replicas(different_bases, 2):
        assert "replicas must share the same base values" in text


def same_losses(rank: int) -> list[str]:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    ensemble = hdet.Ensemble(optimizer, sync_every=1, controllers=[hdet.Controller()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.step()
            ensemble.step(2.5)
    return [str(w.message) for w in caught if w.category is hdet.IdenticalLossWarning]


def test_a_loss_that_was_already_reduced_is_reported_once() -> None:
    first, second = run_replicas(same_losses, 2)
    assert len(first) == 1 and "not an all-reduced one" in first[0]
    assert second == []


# --- faults -----------------------------------------------------------------------------------------


def run_with_fault(rank: int, fault: str) -> dict[str, Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    records = hdet.Records()
    ensemble = hdet.Ensemble(
        optimizer, sync_every=2, controllers=[hdet.Controller(form="paper", temperature=1.0)], records=records
    )
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float(rank))
        if fault == "parameters" and rank == 1:
            model.b1[2] = math.nan
        if fault == "all":
            model.w1[0, 0] = math.inf
    loss = math.inf if fault == "loss" and rank == 1 else 1.0 + rank
    error = ""
    for t in range(2):
        optimizer.step()
        try:
            # With a single infinite loss among finite ones, the replica stays in.
            ensemble.step(math.inf if fault == "one loss" and t == 0 and rank == 1 else loss)
        except hdet.AllReplicasFailedError as e:
            error = str(e)
    return {"parameters": flat(model), "records": list(records), "error": error}


@pytest.mark.parametrize(
    ("fault", "mean", "excluded"),
    [
        ("parameters", (0 + 2 + 3) / 3, {1: "parameters are not finite"}),
        ("loss", (0 + 2 + 3) / 3, {1: "no finite loss in this round"}),
        ("one loss", 1.5, {}),
    ],
)
def test_a_bad_replica_is_left_out_and_receives_the_mean(fault: str, mean: float, excluded: dict) -> None:
    results = run_replicas(run_with_fault, 4, fault)
    for result in results:
        torch.testing.assert_close(result["parameters"], torch.full_like(result["parameters"], mean))
        assert result["error"] == ""
    record = results[0]["records"][0]
    assert record.excluded == excluded
    losses = [1.0, 2.0, 3.0, 4.0]
    if fault == "loss":
        assert record.losses == [1.0, None, 3.0, 4.0]
        assert record.num_nonfinite_losses == [0, 2, 0, 0]
    else:
        assert record.losses == losses
    if excluded:
        kept = [0, 2, 3]
        center = sum(losses[r] for r in kept) / 3
        scores = [math.exp(center - losses[r]) for r in kept]
        weights = [s / sum(scores) for s in scores]
        assert record.section(ComparingRecord).weights == pytest.approx(
            [weights[0], 0, weights[1], weights[2]]
        )


def test_no_healthy_replica_stops_every_rank() -> None:
    for result in run_replicas(run_with_fault, 2, "all"):
        assert "no replica is healthy" in result["error"]
        assert result["records"] == []


def run_hook(rank: int, fault: str) -> list[torch.Tensor]:
    model = DistributedDataParallel(Net(), bucket_cap_mb=1)
    model.register_comm_hook(None, hdet.finite_mean_hook)
    x, y = batch(rank, 0)
    if fault == "all" or (fault == "one" and rank == 1):
        x = x * math.nan
    ((model(x) - y).square().mean()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("fault", "kept"), [("none", [0, 1, 2, 3]), ("one", [0, 2, 3])])
def test_the_gradient_hook_leaves_nonfinite_gradients_out(fault: str, kept: list[int]) -> None:
    expected: list[torch.Tensor] = []
    for rank in kept:
        model = Net()
        x, y = batch(rank, 0)
        (model(x) - y).square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        expected = [a + b for a, b in zip(expected, gradients, strict=True)] if expected else gradients
    for result in run_replicas(run_hook, 4, fault):
        for gradient, total in zip(result, expected, strict=True):
            torch.testing.assert_close(gradient, total / len(kept))


def test_if_every_gradient_is_bad_the_hook_says_so() -> None:
    for result in run_replicas(run_hook, 2, "all"):
        assert all(torch.isnan(gradient).all() for gradient in result)


def run_through_nan(rank: int) -> dict[str, Any]:
    """Replica 1 loses its parameters in mid-round; hook and converge bring it back."""
    model = DistributedDataParallel(Net())
    model.register_comm_hook(None, hdet.finite_mean_hook)
    optimizer = make_optimizer("adam", parameter_groups(model, 1))
    records = hdet.Records()
    ensemble = hdet.Ensemble(optimizer, sync_every=5, records=records, total_steps=10, average_tail=0.9)
    for t in range(10):
        if t == 2 and rank == 1:
            with torch.no_grad():
                next(model.parameters()).fill_(math.nan)
        ensemble.step(train_step(model, optimizer, rank, t))
    return {"parameters": flat(model), "records": list(records)}


def test_a_replica_lost_in_mid_round_comes_back() -> None:
    results = run_replicas(run_through_nan, 4)
    assert all(torch.equal(r["parameters"], results[0]["parameters"]) for r in results)
    assert torch.isfinite(results[0]["parameters"]).all()
    assert [r.excluded for r in results[0]["records"]] == [{1: "parameters are not finite"}, {}]
    assert [r.num_averaged_steps for r in results[0]["records"]] == [0, 9]  # though it was lost in the tail


# --- moments ----------------------------------------------------------------------------------------


def run_moments(rank: int, optimizer_name: str, moments: str) -> list[torch.Tensor]:
    model = DistributedDataParallel(Net())
    if optimizer_name == "coupled":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1
        )
        explore: Any = [hdet.LearningRate(0.5)]
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        explore = [hdet.Momentum(0.5)] if optimizer_name == "momentum" else [hdet.LearningRate(0.5)]
    ensemble = hdet.Ensemble(optimizer, explore=explore, sync_every=5, moments=moments)  # pyright: ignore[reportArgumentType]
    for t in range(5):
        ensemble.step(train_step(model, optimizer, rank, t))
    return [v.clone() for s in optimizer.state.values() for v in s.values() if v is not None and v.dim()]


@pytest.mark.parametrize(
    ("optimizer_name", "moments", "are_equal"),
    [
        ("coupled", "auto", True),
        ("coupled", "keep", False),
        ("momentum", "auto", True),
        ("momentum", "keep", False),
        ("decoupled", "auto", True),  # nothing to do: they never differ
    ],
)
def test_moments_are_averaged_where_they_differ(optimizer_name: str, moments: str, are_equal: bool) -> None:
    results = run_replicas(run_moments, 4, optimizer_name, moments)
    same = all(torch.equal(a, b) for r in results[1:] for a, b in zip(results[0], r, strict=True))
    assert same == are_equal


# --- buffers, groups, warm start ----------------------------------------------------------------------


def run_buffers(rank: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ensemble = hdet.Ensemble(optimizer, model=model, sync_every=1)
    with torch.no_grad():
        model[1].running_mean.fill_(float(rank))  # pyright: ignore[reportCallIssue]
        model[1].num_batches_tracked.fill_(7 + rank)  # pyright: ignore[reportCallIssue]
    optimizer.step()
    ensemble.step(float(rank))
    return {k: v.clone() for k, v in model.state_dict().items()}


def test_floating_buffers_are_averaged_and_counters_left() -> None:
    for rank, state in enumerate(run_replicas(run_buffers, 4)):
        assert state["1.running_mean"].tolist() == [1.5] * 3
        assert state["1.num_batches_tracked"].item() == 7 + rank


def run_with_mask(rank: int) -> bool:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.triu(torch.full((3, 3), -math.inf), 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ensemble = hdet.Ensemble(optimizer, model=model, sync_every=1)
    optimizer.step()
    ensemble.step(float(rank))
    return torch.equal(model.mask, torch.triu(torch.full((3, 3), -math.inf), 1))  # pyright: ignore[reportArgumentType]


def test_an_infinite_mask_is_no_fault() -> None:
    assert all(run_replicas(run_with_mask, 2))


def run_nan_with_batchnorm(rank: int, bad: int) -> dict[str, torch.Tensor]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, hdet.finite_mean_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ensemble = hdet.Ensemble(optimizer, model=model, sync_every=4, total_steps=8, average_tail=0.9)
    for t in range(8):
        if t == 1 and rank == bad:
            with torch.no_grad():
                model[0].weight.fill_(math.nan)  # pyright: ignore[reportCallIssue]
        ensemble.step(train_step(ddp, optimizer, rank, t))
    return {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("bad", [0, 1])
def test_batchnorm_statistics_are_healed(bad: int) -> None:
    for state in run_replicas(run_nan_with_batchnorm, 2, bad):
        assert all(torch.isfinite(value).all() for value in state.values())


def run_from_other_seeds(rank: int, seeds: list[int], is_warm: bool = False) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("hdet.replicas.ranks")
    logger.addHandler(handler)
    try:
        torch.manual_seed(seeds[rank])
        model = nn.Linear(3, 1)
        if is_warm:
            hdet.warm_start(model)
        hdet.Ensemble(torch.optim.SGD(model.parameters(), lr=0.1), model=model).close()
    finally:
        logger.removeHandler(handler)
    return told


def test_replicas_that_begin_with_different_parameters_are_told_of() -> None:
    assert run_replicas(run_from_other_seeds, 2, [0, 0]) == [[], []]
    assert run_replicas(run_from_other_seeds, 2, [0, 0], True) == [[], []]  # a warm start was asked for
    (text,), nothing = run_replicas(run_from_other_seeds, 2, [0, 1])
    assert "use the same seed on every rank" in text and nothing == []


def run_converge_after_warm_start(rank: int) -> torch.Tensor:
    model = DistributedDataParallel(Net())
    optimizer = make_optimizer("sgd", parameter_groups(model, 1))
    hdet.warm_start(model, noise_scale=0.5)
    ensemble = hdet.Ensemble(optimizer, sync_every=10)
    ensemble.converge()
    return flat(model)


def test_converge_before_the_first_step_averages_a_warm_start() -> None:
    results = run_replicas(run_converge_after_warm_start, 2)
    assert torch.equal(results[0], results[1])


def run_half_hook(rank: int) -> float:
    layer = nn.Linear(1, 1, bias=False).half()
    ddp = DistributedDataParallel(layer)
    ddp.register_comm_hook(None, hdet.finite_mean_hook)
    (ddp(torch.full((1, 1), 200.0, dtype=torch.float16)) * 200).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.item()


def test_the_gradient_hook_does_not_overflow_half_precision() -> None:
    assert run_replicas(run_half_hook, 2) == [40000.0, 40000.0]


def run_in_group(rank: int) -> float:
    """Two pairs of replicas, each its own ensemble."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    parameter = nn.Parameter(torch.full((2,), float(rank)))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    ensemble = hdet.Ensemble(optimizer, sync_every=1, replicas=pairs[rank // 2])
    optimizer.step()
    ensemble.step(float(rank))
    return parameter[0].item()


def test_replicas_can_be_a_process_group() -> None:
    assert run_replicas(run_in_group, 4) == [0.5, 0.5, 2.5, 2.5]


def run_warm_start(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    model = DistributedDataParallel(Net(seed=rank))  # the wrapper copies rank zero's parameters
    before = flat(model).clone()
    hdet.warm_start(model, noise_scale=0.1)
    return before, flat(model)


def test_warm_start_differs_by_replica_after_wrapping() -> None:
    results = run_replicas(run_warm_start, 4)
    for before, after in results:
        assert torch.equal(before, results[0][0])
        assert not torch.equal(after, before)
    assert len({tuple(after.tolist()) for _, after in results}) == 4
    again = run_replicas(run_warm_start, 4)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(results, again, strict=True))


def run_from_warm_start(rank, when):
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    if when == "before":
        hdet.warm_start(model, 0.05)
    equal = [hdet.LearningRate(0.0)]  # nothing else to sync for
    ensemble = hdet.Ensemble(optimizer, model=model, explore=equal, sync_every=5)
    if when == "after":
        ensemble.warm_start(0.05)
    apart = not torch.equal(*of_both(net.w1))
    train(ensemble, model, optimizer, rank, range(10))
    return apart, torch.equal(*of_both(net.w1))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_warm_start_is_averaged_at_the_first_sync(when):
    assert run_replicas(run_from_warm_start, 2, when) == [(True, True)] * 2


# --- saving and resuming --------------------------------------------------------------------------------


def run_resume(rank: int, kind: str, stop_at: int, until: int, checkpoint: bytes | None) -> dict[str, Any]:
    """Train to ``until``, converging at ``stop_at`` as a save does; or resume there from a checkpoint."""
    # DDP orders its buckets anew after the first step of a process. With more than two ranks that changes
    # the last bits of its gradients, with or without hdet: they are averaged by hand here.
    model = DistributedDataParallel(Net()) if dist.get_world_size() == 2 else SharedGradients(Net())
    optimizer = make_optimizer("adamw", parameter_groups(model, 4))
    records = hdet.Records()
    if kind == "one cycle":
        scheduler: Any = hdet.OneCycleAutoLR(
            optimizer,
            0.02,
            30,
            ensemble_lr_spread_ratio=0.2,
            model_sync_interval=5,
            enable_auto_lr=True,
            auto_lr_warmup_steps=8,
            loss_scale="auto",
            records=records,
        )
    else:
        scheduler = hdet.Ensemble(
            optimizer,
            scheduler=CosineAnnealingLR(optimizer, T_max=30),
            explore=[hdet.LearningRate(0.2)],
            sync_every=5,
            total_steps=30,
            controllers=[hdet.Controller(start=8)],
            records=records,
            average_tail=0.2,
        )
    begin = 0
    if checkpoint is not None:
        state = torch.load(io.BytesIO(checkpoint), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        begin = stop_at
    saved = b""
    values = []
    for t in range(begin, until):
        values.append([g["lr"] for g in optimizer.param_groups])
        scheduler.step(train_step(model, optimizer, rank, t))
        if t + 1 == stop_at and checkpoint is None:
            scheduler.converge()
            file = io.BytesIO()
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            torch.save(state, file)
            saved = file.getvalue()
    return {
        "parameters": flat(model),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "values": values,
        "saved": saved,
        "records": [(r.step, r.losses, r.base, r.controllers) for r in records],
    }


@pytest.mark.parametrize("kind", ["one cycle", "ensemble"])
@pytest.mark.parametrize("stop_at", [5, 10, 13, 27])
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_resume_ends_in_the_same_bits(kind: str, stop_at: int, num_replicas: int) -> None:
    whole = run_replicas(run_resume, num_replicas, kind, stop_at, 30, None)
    # The file of every rank is the same; one rank's serves all.
    first = torch.load(io.BytesIO(whole[0]["saved"]), weights_only=True)
    for result in whole[1:]:
        other = torch.load(io.BytesIO(result["saved"]), weights_only=True)
        _assert_same(first, other)
    if stop_at == 13:
        end_processes()  # fresh ones need nothing but the file; they take a while, so not every time
    resumed = run_replicas(run_resume, num_replicas, kind, stop_at, 30, whole[1]["saved"])
    for a, b in zip(whole, resumed, strict=True):
        assert torch.equal(a["parameters"], b["parameters"])
        assert a["values"][stop_at:] == b["values"]
        _assert_same(a["optimizer"], b["optimizer"])
        _assert_same(a["scheduler"], b["scheduler"])
    assert (
        len({tuple(map(tuple, r["values"])) for r in resumed}) == num_replicas
    )  # every replica kept its own values
    after = [r for r in whole[0]["records"] if r[0] > stop_at]
    assert after == resumed[0]["records"]


@pytest.mark.parametrize("kind", ["one cycle", "ensemble"])
def test_a_checkpoint_loads_into_another_number_of_replicas(kind: str) -> None:
    whole = run_replicas(run_resume, 4, kind, 13, 13, None)
    for num_replicas in (2, 3):
        resumed = run_replicas(run_resume, num_replicas, kind, 13, 30, whole[0]["saved"])
        assert all(torch.equal(r["parameters"], resumed[0]["parameters"]) for r in resumed)
        assert [r[0] for r in resumed[0]["records"]] == [15, 20, 25, 30]
        mean = sum(torch.tensor(r["values"][0]) for r in resumed) / num_replicas
        # Multipliers of the new number of replicas have mean one: the base goes on where it was.
        bases = [tunable["scheduled"][0] for tunable in _tunables(whole[0]["scheduler"]).values()]
        held = [tunable["held"] for tunable in _tunables(whole[0]["scheduler"]).values()]
        corrections = [
            math.prod(dict(tunable["factors"]).values())
            for tunable in _tunables(whole[0]["scheduler"]).values()
        ]
        expected = [h[0] if h else b * c for b, h, c in zip(bases, held, corrections, strict=True)]
        torch.testing.assert_close(torch.as_tensor(mean), torch.tensor(expected), rtol=1e-6, atol=0)


def _tunables(state: dict[str, Any]) -> dict[str, Any]:
    return state.get("ensemble", state)["tunables"]


def unconverged_state(rank: int) -> list[str]:
    model = DistributedDataParallel(Net())
    optimizer = make_optimizer("sgd", parameter_groups(model, 1))
    ensemble = hdet.Ensemble(optimizer, sync_every=10)
    ensemble.step(train_step(model, optimizer, rank, 0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ensemble.state_dict()
        ensemble.converge()
        ensemble.state_dict()
    return [str(w.message) for w in caught]


def test_saving_before_converge_warns() -> None:
    for texts in run_replicas(unconverged_state, 2):
        assert len(texts) == 1 and "call converge() on every replica before saving" in texts[0]


def _assert_same(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            _assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            _assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b

"""Copies of equal replicas are kept in parts, one for each replica, and make a whole again."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.replicas import RankReplicas, ReplicaGroup, copies
from hdet.replicas.copies import ALONE, SlicedCopy
from tests.helpers.models import Net, batch
from tests.helpers.replicas import run_replicas

STEPS, SYNC = 80, 4  # the tail are the last six


def tensors(seed: int = 0) -> list[Tensor]:
    """Of several dtypes and layouts, with empty ones and scattered ones among them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return [
        draw(7, 5),
        draw(3, 4).t(),
        torch.tensor(2.5),
        draw(0, 3),
        draw(11, dtype=torch.bfloat16),
        draw(6, 6)[:, ::2],
        draw(5, dtype=torch.float32),
        torch.complex(draw(2, dtype=torch.float32), draw(2, dtype=torch.float32)),
    ]


def _copied(rank: int, world_size: int, bucket_bytes: int) -> list[Any]:
    copies.BUCKET_BYTES = bucket_bytes
    group = ReplicaGroup.of(None)
    ours, theirs = SlicedCopy(tensors(), group, widens=True), SlicedCopy(tensors(), widens=True)
    sizes = [sum(part.numel() for part in one.parts) for one in (ours, theirs)]
    for one in (ours, theirs):
        one.lerp(tensors(1), 0.25)
    split, whole = tensors(2), tensors(2)
    ours.put(split)
    theirs.put(whole)
    are_equal = [torch.equal(a, b) for a, b in zip(split, whole, strict=True)]
    are_equal += [torch.equal(a, b) for a, b in zip(ours.whole(), theirs.shaped(), strict=True)]
    first = SlicedCopy(tensors(3), group)
    first.take(tensors(4))
    held = tensors(5)
    first.put(held)
    are_equal += [torch.equal(a, b) for a, b in zip(held, tensors(4), strict=True)]
    return [sizes, are_equal]


@pytest.mark.parametrize("bucket_bytes", [64, 2**20])
@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_make_the_whole(world_size: int, bucket_bytes: int) -> None:
    for (here, whole), are_equal in run_replicas(_copied, world_size, world_size, bucket_bytes):
        assert all(are_equal) and len(are_equal) == 3 * len(tensors())
        assert whole / world_size - 6 <= here <= whole / world_size + 6  # up to one element per kind


class Run:
    """A run of AutoLR with shared gradients, whose copies are in parts or whole."""

    def __init__(self, rank: int, *, is_whole: bool = False) -> None:
        self.rank, self.net = rank, Net()
        self.model = DistributedDataParallel(self.net) if torch.distributed.is_initialized() else self.net
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.02)
        kept = RankReplicas.equal_group
        if is_whole:
            RankReplicas.equal_group = lambda self: ALONE
        try:
            self.auto = hdet.AutoLR(self.optimizer, model=self.model, total_steps=STEPS, sync_every=SYNC)
        finally:
            RankReplicas.equal_group = kept

    def train(self, until: int = STEPS, fault: tuple[int, float] | None = None) -> list[Tensor]:
        """A fault multiplies the weights after a step."""
        for step in range(self.auto.num_steps, until):
            x, y = batch(self.rank, step)
            loss = (self.model(x) - y).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if fault is not None and step == fault[0]:
                with torch.no_grad():
                    for p in self.net.parameters():
                        p.mul_(fault[1])
            self.auto.step(loss)
        return self.weights()

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]


def _run(rank: int, is_whole: bool) -> tuple[list[Tensor], int]:
    run = Run(rank, is_whole=is_whole)
    mean = run.auto.tail._mean
    assert mean is not None
    return run.train(), sum(part.numel() for part in mean.mean)


def test_a_run_with_parts_is_a_run_with_whole_copies() -> None:
    for (mine, part), (theirs, whole) in zip(
        run_replicas(_run, 3, False), run_replicas(_run, 3, True), strict=True
    ):
        assert part <= whole / 3 + 1
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


@pytest.mark.parametrize("factor", [torch.nan, 1e4])
def test_a_replica_that_is_spoilt_in_the_tail_does_not_spoil_the_mean(factor: float) -> None:
    good, _ = run_replicas(_run, 3, False)[0]
    for weights, told in run_replicas(_late_fault, 3, factor):
        for mine, theirs in zip(weights, good, strict=True):
            # A third of the weights is that of the last step, the rest is the mean.
            assert (mine - theirs).norm() < 0.05 * theirs.norm()
        assert told in ([], ["step 80: of the mean of the tail, the part of replica 1 begins again"])
    assert told == []


def _late_fault(rank: int, factor: float) -> tuple[list[Tensor], list[str]]:
    """After the last optimizer step, so that no gradient is taken with spoilt weights."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("hdet.ensemble.tail").addHandler(handler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = Run(rank).train(fault=(STEPS - 1, factor) if rank == 1 else None)
    logging.getLogger("hdet.ensemble.tail").removeHandler(handler)
    return weights, told


def _saves(rank: int) -> dict[str, Any]:
    run = Run(rank)
    run.train(until=77)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        early = run.auto.state_dict()
    run.auto.converge()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = run.auto.state_dict()
    weights, optimizer = run.weights(), copy.deepcopy(run.optimizer.state_dict())
    return {
        "told": [str(w.message) for w in caught if w.category is hdet.NotConvergedWarning],
        "early": early["tail"],
        "state": state,
        "weights": weights,
        "optimizer": optimizer,
        "end": run.train(),
    }


def _resumes(rank: int, saved: dict[str, Any]) -> list[Tensor]:
    run = Run(rank)
    with torch.no_grad():
        for p, value in zip(run.net.parameters(), saved["weights"], strict=True):
            p.copy_(value)
    run.optimizer.load_state_dict(saved["optimizer"])
    run.auto.load_state_dict(saved["state"])
    return run.train()


def test_a_checkpoint_within_the_tail_holds_the_whole_mean() -> None:
    first, second = run_replicas(_saves, 2)
    assert first["early"] is None and len(first["told"]) == 1
    assert "call converge() on every replica before saving" in first["told"][0]
    for mine, theirs in zip(first["state"]["tail"]["mean"], second["state"]["tail"]["mean"], strict=True):
        assert torch.equal(mine, theirs)
    for end in run_replicas(_resumes, 2, first):
        assert all(torch.equal(a, b) for a, b in zip(end, first["end"], strict=True))
    whole = run_replicas(_resumes, 3, first)  # other batches for the third, so only the form is the same
    assert all(torch.equal(a, b) for a, b in zip(whole[0], whole[2], strict=True))


def test_a_checkpoint_of_two_replicas_goes_on_in_one_process() -> None:
    saved = run_replicas(_saves, 2)[0]
    run = Run(0)
    run.auto.load_state_dict(saved["state"])
    mean = run.auto.tail._mean
    assert mean is not None and mean.num_taken == 3
    for mine, theirs in zip(mean.mean, saved["state"]["tail"]["mean"], strict=True):
        assert torch.equal(mine, theirs)


def _resumes_around_brakes(rank: int) -> tuple[list[list[bool]], list[str], int]:
    """The weights are spoilt in all replicas, so that the guard goes back, the second time to the start."""
    run, states, fault = Run(rank), [], (40, 30.0)
    for step in (10, 39, 43, 47, 50):
        run.train(until=step, fault=fault)
        run.auto.converge()
        parts = (run.net, run.optimizer, run.auto)
        states.append(copy.deepcopy([part.state_dict() for part in parts]))
    run.train(until=51, fault=fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run.auto.state_dict()["controllers"]["guard"]["copies"] == {}
    end = run.train(fault=fault)
    equal = []
    for state in states:
        other = Run(rank)
        for part, saved in zip((other.net, other.optimizer, other.auto), state, strict=True):
            part.load_state_dict(saved)
        equal.append([torch.equal(a, b) for a, b in zip(other.train(fault=fault), end, strict=True)])
    num_brakes = run.auto.state_dict()["controllers"]["guard"]["num_brakes"]
    return equal, [str(w.message) for w in caught if w.category is hdet.NotConvergedWarning], num_brakes


def test_copies_in_parts_are_saved_so_that_a_resumed_guard_goes_back_as_far() -> None:
    for equal, told, num_brakes in run_replicas(_resumes_around_brakes, 2):
        assert num_brakes > 0 and all(all(each) for each in equal), equal
        assert len(told) == 1 and "a part of the copies of the guard" in told[0]


def _copy_of_a_bad_start(rank: int) -> list[list[Tensor]]:
    run = Run(rank)
    if rank == 1:
        with torch.no_grad():
            for p in run.net.parameters():
                p.mul_(1e3)
    run.auto.begin_at(0)  # the guard's copy of the start is taken, and nobody has looked at the weights
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        healed = run.train(until=SYNC)
    run.train(until=2 * SYNC)
    run.auto.replicas.restore(next(iter(run.auto.controllers))._initial)  # pyright: ignore[reportAttributeAccessIssue]
    return [healed, run.weights()]


def test_the_copy_of_a_start_that_was_not_equal_is_taken_again() -> None:
    for healed, restored in run_replicas(_copy_of_a_bad_start, 3):
        assert all(torch.equal(a, b) for a, b in zip(healed, restored, strict=True))


def _search_that_fails(rank: int, failing: list[int]) -> tuple[str, list[str], bool, bool]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    before, moment = model.weight.detach().clone(), optimizer.state[model.weight]["exp_avg"]
    count = 0

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if count > 60 and rank in failing:
            raise RuntimeError("no more")
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("hdet.search.saved_training").addHandler(handler)
    data = [batch(rank, step)[0] for step in range(20)]
    try:
        hdet.find_lr(model, optimizer, data, loss_of, total_steps=500)
        message = ""
    except RuntimeError as error:
        message = str(error)
    logging.getLogger("hdet.search.saved_training").removeHandler(handler)
    is_kept = optimizer.state[model.weight]["exp_avg"] is moment
    return message, told, is_kept, torch.equal(before, model.weight.detach())


def test_a_search_that_fails_does_not_wait_for_the_others() -> None:
    """Here all fail, at the same place. A rank that fails alone ends as quickly: it sends nothing."""
    for message, told, is_kept, _ in run_replicas(_search_that_fails, 2, [0, 1]):
        assert message == "no more" and is_kept
        assert len(told) == 1 and "so the model holds those of a trial" in told[0]
    for message, _, is_kept, is_same in run_replicas(_search_that_fails, 2, []):
        assert message == "" and is_kept and is_same
    ((message, told, is_kept, is_same),) = run_replicas(_search_that_fails, 1, [0])
    assert message == "no more" and is_kept and is_same and told == []


def _searched_without_shared_gradients(rank: int) -> list[bool]:
    """Whether what trials begin with is what this replica had taken."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from hdet.replicas.tensors import local_part

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    data = [torch.randn(16, 6, generator=generator, dtype=torch.float64) for _ in range(20)]
    taken: list[Tensor] = []
    fits: list[bool] = []

    class Watched(copies.WeightsCopy):
        def take(self) -> None:
            super().take()
            taken[:] = [local_part(p).detach().clone() for p in model.parameters()]

        def put(self, what: str) -> None:
            super().put(what)
            if what == "a trial":
                now = [local_part(p) for p in model.parameters()]
                fits.append(all(torch.allclose(a, b, atol=1e-12) for a, b in zip(now, taken, strict=True)))

    from hdet.search import saved_training

    whole, saved_training.WeightsCopy = saved_training.WeightsCopy, Watched
    try:
        hdet.find_lr(
            model,
            optimizer,
            data,
            lambda m, x: (m(x) - x.sum(1, True)).square().mean(),
            total_steps=100,
            replicas=mesh["replicate"],
        )
    finally:
        saved_training.WeightsCopy = whole
    return fits


def test_replicas_that_share_no_gradients_stay_equal_in_the_ramp():
    for fits in run_replicas(_searched_without_shared_gradients, 4):
        assert len(fits) >= 8 and all(fits)


def _collapsed_after_a_warm_start(rank: int) -> float:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(4, 1))
    hdet.warm_start(ddp, 0.01, seed=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    ensemble = hdet.Ensemble(
        optimizer,
        model=ddp,
        explore=[hdet.LearningRate(0.0)],
        sync_every=5,
        total_steps=100,
        controllers=[hdet.Guard(interval=0.9)],
    )
    for step in range(100):
        ddp(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        has_collapsed = 45 <= step < 55
        ensemble.step(100.0 if has_collapsed else 4.0 - 0.03 * step)
    return float(ensemble.controllers.state_dict()["guard"]["num_brakes"])


def test_a_run_with_a_perturbed_start_can_begin_again():
    assert run_replicas(_collapsed_after_a_warm_start, 2) == [1.0, 1.0]

"""Every kind of training loop: AutoLR is the plain loop with its schedule, and a tail computed by hand.

Each member is a loop as users write it: a precision, a scaler, a compiler, accumulation, a setting of
DistributedDataParallel. One suite runs over all of them. bfloat16 models here multiply element by element:
matrix products in bfloat16 crash on some CPUs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

import hdet
from hdet.method.recipe import Recipe, tail_steps
from hdet.round_record import GuardRecord
from tests.helpers.replicas import run_replicas

# torch's own, when its compiler is imported
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

STEPS, SYNC_EVERY, SIZE = 60, 5, 8
RECIPE = Recipe(total_steps=STEPS, sync_every=SYNC_EVERY)
BAD_CALLS = (7, 31)
"""Calls whose gradients are not finite, in loops that skip such steps."""


class Gates(nn.Module):
    """Element by element, so that it runs in every precision on every CPU."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        draws = [torch.randn(6, generator=generator).to(dtype) for _ in range(3)]
        self.w, self.b, self.v = (nn.Parameter(draw) for draw in draws)

    def forward(self, x: Tensor) -> Tensor:
        return ((x.to(self.w.dtype) * self.w + self.b).tanh() * self.v).sum(dim=1)


class Layers(nn.Module):
    """Matrices, with dropout, so that random numbers count."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1))
        self.outer, self.recomputes = nn.Linear(8, 1), recomputes

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x)
        return self.outer(hidden).squeeze(1)


class Branches(nn.Module):
    """One of two branches at a time: the other's parameters have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(6, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[int(x[0, 0] > 0)](x).squeeze(1)


def batch_of(rank: int, call: int) -> Tensor:
    return torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1000 * call + rank))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - x.sin().sum(dim=1)).square().mean()


class Loop:
    """A loop as users write it, one call at a time."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def update(self, rank: int, call: int) -> tuple[list[Tensor], bool]:
        """One call of ``optimizer.step()``: the losses that led to it, and whether it was made."""
        loss = loss_of(self.model, batch_of(rank, call))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return [loss.detach()], True


class Scaled(Loop):
    """With a gradient scaler, whose first scale is too large; some gradients are not finite."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(model, optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=10)
        self.cast = contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    def update(self, rank: int, call: int) -> tuple[list[Tensor], bool]:
        with self.cast:
            loss = loss_of(self.model, batch_of(rank, call))
        self.optimizer.zero_grad()
        self.scaler.scale(loss * (torch.inf if call in BAD_CALLS else 1.0)).backward()
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return [loss.detach()], self.scaler.get_scale() >= scale


class Accumulated(Loop):
    """Three micro-batches for each step."""

    def update(self, rank: int, call: int) -> tuple[list[Tensor], bool]:
        losses = []
        self.optimizer.zero_grad()
        for micro in range(3):
            is_last = micro == 2
            has_sync = isinstance(self.model, DistributedDataParallel) and not is_last
            with self.model.no_sync() if has_sync else contextlib.nullcontext():  # pyright: ignore[reportCallIssue]
                loss = loss_of(self.model, batch_of(rank, 3 * call + micro))
                (loss / 3).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        return losses, True


class Compiled(Loop):
    """Model and optimizer are compiled, and the learning rate is a tensor."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        torch._dynamo.reset()
        super().__init__(torch.compile(model, backend="aot_eager"), optimizer)  # pyright: ignore[reportArgumentType]
        # A function around it: torch's schedules do not take an optimizer whose step itself is compiled.
        self.step = torch.compile(lambda: self.optimizer.step(), backend="aot_eager")

    def update(self, rank: int, call: int) -> tuple[list[Tensor], bool]:
        loss = loss_of(self.model, batch_of(rank, call))
        self.optimizer.zero_grad()
        loss.backward()
        self.step()
        return [loss.detach()], True


@dataclass(frozen=True)
class Member:
    """How a loop is built, and on how many ranks it runs."""

    model: Callable[[], nn.Module]
    optimizer: Callable[..., Optimizer]
    kind: Callable[..., Loop] = Loop
    ddp: dict[str, Any] | None = None
    """Arguments of DistributedDataParallel; None for one process."""

    def build(self) -> Loop:
        model = self.model()
        optimizer = self.optimizer(model.parameters())
        wrapped = model if self.ddp is None else DistributedDataParallel(model, **self.ddp)
        return self.kind(wrapped, optimizer)


adamw = functools.partial(AdamW, lr=0.02, weight_decay=0.1)
sgd = functools.partial(SGD, lr=0.05, momentum=0.9)
bf16, fp16 = (functools.partial(Gates, dtype) for dtype in (torch.bfloat16, torch.float16))


def tensor_lr(parameters: Any) -> Optimizer:
    return adamw(parameters, lr=torch.tensor(0.02))


MEMBERS = {
    "bf16": Member(bf16, adamw),
    "bf16 fused": Member(bf16, functools.partial(adamw, fused=True)),
    "bf16 foreach": Member(bf16, functools.partial(adamw, foreach=True)),
    "bf16 sgd": Member(bf16, sgd),
    "fp16": Member(fp16, functools.partial(adamw, eps=1e-4)),  # a scaler refuses gradients in float16
    "fp16 autocast": Member(Layers, adamw, functools.partial(Scaled, dtype=torch.float16)),
    "fused scaled": Member(Layers, functools.partial(adamw, fused=True), Scaled),
    "tensor lr": Member(Layers, tensor_lr),
    "compiled": Member(Gates, tensor_lr, Compiled),
    "accumulated": Member(Layers, adamw, Accumulated),
    "recomputed": Member(functools.partial(Layers, recomputes=True), adamw),
}
ON_RANKS = {
    "static graph": Member(Layers, adamw, ddp={"static_graph": True}),
    "recomputed, static graph": Member(
        functools.partial(Layers, recomputes=True), adamw, ddp={"static_graph": True}
    ),
    "unused parameters": Member(Branches, adamw, ddp={"find_unused_parameters": True}),
    "bucket views": Member(Layers, adamw, ddp={"gradient_as_bucket_view": True}),
    "accumulated": Member(Layers, sgd, Accumulated, ddp={"gradient_as_bucket_view": True}),
    "bf16": Member(bf16, adamw, ddp={}),
    "fp16 autocast": Member(Layers, adamw, functools.partial(Scaled, dtype=torch.float16), ddp={}),
}


def by_hand(loop: Loop, rank: int, peak: float) -> tuple[list[Tensor], list[list[float]], int]:
    """The plain loop: its last weights averaged over the tail, the losses of every round, and its calls."""
    for group in loop.optimizer.param_groups:
        group["lr"] = group["lr"].fill_(peak) if isinstance(group["lr"], Tensor) else peak
    schedule = LambdaLR(loop.optimizer, RECIPE.shape)
    parameters = list(loop.model.parameters())
    taken, rounds, losses = list[list[Tensor]](), list[list[float]](), list[float]()
    step = call = 0
    while step < STEPS:
        seen, is_made = loop.update(rank, call)
        call += 1
        losses += [loss.item() for loss in seen]
        if is_made:
            step += 1
            schedule.step()
            if step in tail_steps(STEPS, RECIPE.average_tail):
                taken.append([p.detach().double() for p in parameters])
            if step % SYNC_EVERY == 0:
                rounds.append(losses)
                losses = []
    mean = [torch.stack(each).mean(dim=0) for each in zip(*taken, strict=True)]
    return [m.to(p.dtype) for m, p in zip(mean, parameters, strict=True)], rounds, call


def with_auto_lr(loop: Loop, rank: int, found: hdet.FoundLR) -> tuple[list[Tensor], list[Any], int]:
    """The same loop with AutoLR: the weights that it ends with, its records, and its calls."""
    records = hdet.Records()
    auto = hdet.AutoLR(
        loop.optimizer,
        total_steps=STEPS,
        model=loop.model,
        found=found,
        sync_every=SYNC_EVERY,
        records=records,
    )
    call = 0
    is_fused = any(group.get("fused") for group in loop.optimizer.param_groups)
    while auto.num_steps < STEPS:
        seen, is_made = loop.update(rank, call)
        call += 1
        for loss in seen[:-1]:
            auto.observe(loss)
        auto.step(seen[-1], skipped=is_fused and not is_made)  # a fused optimizer does not tell
    assert not any(record.section(GuardRecord).num_brakes or record.excluded for record in records)
    return [p.detach().clone() for p in loop.model.parameters()], list(records)[1:], call


def search(loop: Loop, rank: int) -> hdet.FoundLR:
    """The learning rate; all is as it was."""
    for call in range(2):  # so that there are moments, gradients and a graph of DDP's
        loop.update(rank, call)
    held = [loop.model.state_dict(), loop.optimizer.state_dict(), torch.get_rng_state()]
    gradients = [p.grad for p in loop.model.parameters()]
    before = copy.deepcopy([*held, gradients])
    batches = [batch_of(rank, call) for call in range(40)]
    found = hdet.find_lr(loop.model, loop.optimizer, batches, loss_of, total_steps=STEPS)
    after = [loop.model.state_dict(), loop.optimizer.state_dict(), torch.get_rng_state(), gradients]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    assert all(p.grad is gradient for p, gradient in zip(loop.model.parameters(), gradients, strict=True))
    return found


def compare(member: Member, rank: int) -> tuple[list[float], list[Tensor]]:
    found = search(member.build(), rank)
    assert found.low[0] <= found.lr[0] <= found.high[0] and found.expected_loss is not None
    torch.manual_seed(1)
    expected, rounds, num_calls = by_hand(member.build(), rank, found.lr[0])
    torch.manual_seed(1)
    weights, records, calls = with_auto_lr(member.build(), rank, found)
    assert calls == num_calls
    rtol = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(weights[0].dtype, 1e-5)
    for mine, theirs in zip(weights, expected, strict=True):  # by the rounding of the mean
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-6)
    if rank == 0:
        for record, losses in zip(records, rounds, strict=True):
            finite = [loss for loss in losses if math.isfinite(loss)]
            assert record.losses[0] == pytest.approx(math.fsum(finite) / len(finite), rel=1e-6)
    return found.lr, weights


@pytest.mark.parametrize("name", MEMBERS)
def test_a_run_is_the_plain_loop_with_the_same_schedule_and_tail(name: str) -> None:
    compare(MEMBERS[name], 0)


def _on_rank(rank: int, name: str) -> tuple[list[float], list[Tensor]]:
    return compare(ON_RANKS[name], rank)


@pytest.mark.parametrize("name", ON_RANKS)
def test_and_so_it_is_on_two_ranks(name: str) -> None:
    (lr, mine), (other_lr, theirs) = run_replicas(_on_rank, 2, name)
    assert lr == other_lr
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_loops_that_skip_steps_have_skipped_some() -> None:
    for name, least in (("fp16 autocast", 2), ("fused scaled", 2)):
        _, _, num_calls = by_hand(MEMBERS[name].build(), 0, 0.01)
        assert num_calls >= STEPS + least, name


def test_nothing_is_compiled_again_by_trials_and_syncs() -> None:
    """A search compiles the model for training, for scoring and for parts of a batch. A run adds none."""
    loop = MEMBERS["compiled"].build()
    counters.clear()
    seen: list[int] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = loss_of(model, x)
        seen.append(counters["stats"]["unique_graphs"])
        return value

    batches = [batch_of(0, call) for call in range(40)]
    found = hdet.find_lr(loop.model, loop.optimizer, batches, loss, total_steps=STEPS)
    assert seen[-1] <= 3
    num_in_trials = len(seen) - len(found.ramp) * 2 - 4
    assert len(found.trials) >= 8 and set(seen[-(num_in_trials * 3) // 4 :]) == {seen[-1]}
    auto = hdet.AutoLR(
        loop.optimizer,
        total_steps=STEPS,
        model=loop.model,
        found=found,
        sync_every=SYNC_EVERY,
        records=hdet.Records(),
    )
    numbers = []
    for call in range(STEPS):
        losses, _ = loop.update(0, call)
        auto.step(losses[-1])
        numbers.append(counters["stats"]["unique_graphs"])
    assert seen[-1] < numbers[0] <= seen[-1] + 2  # the optimizer's
    assert set(numbers) == {numbers[0]}


class Normalized(nn.Module):
    """Batch norm between two layers."""

    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), kind(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze(1)


def _with_batch_norm(rank: int, kind: Callable[[int], nn.Module]) -> Any:
    model = Normalized(kind)
    optimizer = sgd(model.parameters())
    batches = [batch_of(rank, call) for call in range(40)]
    weight = model.layers[3].weight.detach().clone()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        """Far from the start it is not finite, on the second rank."""
        is_far = (model.layers[3].weight - weight).abs().max() > 0.3  # pyright: ignore
        return loss_of(model, x) * (torch.nan if rank == 1 and is_far else 1.0)

    found = hdet.find_lr(model, optimizer, batches, loss, total_steps=200)
    assert "forward" not in vars(model.layers[1])
    return found.lr, found.trials, [b.clone() for b in model.buffers()]


def test_a_search_takes_the_batch_statistics_of_each_rank() -> None:
    """Some trials end early on the second rank. SyncBatchNorm would wait for it forever.

    SyncBatchNorm itself needs a GPU. What can be shown here is that a search does without its exchange.
    """
    synced = run_replicas(_with_batch_norm, 2, nn.SyncBatchNorm)
    plain = run_replicas(_with_batch_norm, 2, nn.BatchNorm1d)
    assert 0 < sum(score is None for _, score in plain[0][1]) <= len(plain[0][1]) // 2
    for (lr, trials, buffers), (other_lr, other_trials, other_buffers) in zip(synced, plain, strict=True):
        assert (lr, trials) == (other_lr, other_trials)
        torch.testing.assert_close(buffers, other_buffers, rtol=0, atol=0)

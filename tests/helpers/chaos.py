"""A training run that is killed and spoilt at random, and started again from its last checkpoint."""

from __future__ import annotations

import copy
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.helpers.faults import Fault, Faults
from tests.helpers.models import batch
from tests.helpers.replicas import forkserver

__all__ = [
    "SPOILS",
    "Plan",
    "Result",
    "assert_healed",
    "assert_same_bits",
    "random_kills",
    "random_spoils",
    "run_to_the_end",
]

SPOILS = ("nan_loss", "nan_gradients", "nan_parameters")


@dataclass(frozen=True)
class Plan:
    """What is trained, and how often it syncs and saves."""

    world_size: int
    total_steps: int
    sync_every: int = 5
    save_every: int = 12
    """Not a multiple of ``sync_every``: most checkpoints are written within a round."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    states: list[dict[str, Tensor]]
    """Parameters, buffers and moments of every rank; statistics of rank zero only, as in a checkpoint."""
    num_starts: int
    happened: set[str]
    """The names of the faults that did happen."""
    files: set[str]
    """What is in the folder of checkpoints."""
    log: str
    """All that the processes have said."""


# --- what happens when ------------------------------------------------------------------------------


def random_kills(plan: Plan, generator: random.Random, count: int) -> list[Fault]:
    """Kills at random steps, of which one is in the warm-up and one in the tail; a third while saving."""
    num_saves, tenth = count // 3, plan.total_steps // 10
    steps = [
        generator.randrange(tenth),
        generator.randrange(plan.total_steps - tenth // 2, plan.total_steps),
        *generator.sample(range(tenth, plan.total_steps - tenth), count - num_saves - 2),
    ]
    saves = generator.sample(range(plan.save_every - 1, plan.total_steps, plan.save_every), num_saves)
    return [Fault("kill", replica=generator.randrange(plan.world_size), step=step) for step in steps] + [
        Fault("kill_while_saving", replica=0, step=step, num_bytes=generator.randrange(1, 3000))
        for step in saves
    ]


def random_spoils(
    plan: Plan, generator: random.Random, count: int, kinds: tuple[str, ...] = SPOILS
) -> list[Fault]:
    """NaN at random steps, at most one in two rounds: what comes in every round is a lasting fault."""
    pairs = generator.sample(range(plan.total_steps // (2 * plan.sync_every)), count)
    return [
        Fault(
            kinds[i % len(kinds)],
            replica=generator.randrange(plan.world_size),
            step=2 * plan.sync_every * pair + generator.randrange(plan.sync_every),
            factor=1.5,
        )
        for i, pair in enumerate(pairs)
    ]


# --- how it must end --------------------------------------------------------------------------------


def assert_same_bits(result: Result, undisturbed: Result) -> None:
    """After kills: every rank ends as if nothing had happened."""
    _assert_nothing_in_part(result)
    for state, expected in zip(result.states, undisturbed.states, strict=True):
        assert state.keys() == expected.keys()
        for name, value in state.items():
            assert torch.equal(value, expected[name]), f"{name} is not what it is without faults"


def assert_healed(result: Result, undisturbed: Result) -> None:
    """After NaN: ranks are equal and finite, and have learnt as much as without."""
    _assert_nothing_in_part(result)
    for state in result.states:
        for name, value in state.items():
            assert torch.isfinite(value).all(), f"{name} is not finite"
            assert torch.equal(value, result.states[0][name]), f"{name} differs between ranks"
    loss, expected = (_held_out_loss(one.states[0]) for one in (result, undisturbed))
    assert abs(loss - expected) < 0.1 * expected, f"loss {loss} instead of {expected}"


def _assert_nothing_in_part(result: Result) -> None:
    assert result.files == {"last.pt"}, f"checkpoints are left in part: {result.files}"


# --- one process ------------------------------------------------------------------------------------


def build() -> nn.Sequential:
    """A net with statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    )


def _loss_of(model: nn.Module, replica: int, step: int, seed: int = 0) -> Tensor:
    x, y = batch(replica, step, seed)
    return (model(x.float()) - y.float()).square().mean()


def _held_out_loss(state: dict[str, Tensor]) -> float:
    """The loss of a final state on batches that no replica has seen."""
    model = build()
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    model.eval()
    with torch.no_grad():
        return sum(_loss_of(model, 0, step, seed=1).item() for step in range(50)) / 50


def save(path: Path, state: dict[str, Any]) -> None:
    """A crash leaves the old file or the new one, never a part."""
    unfinished = path.with_suffix(".tmp")
    torch.save(state, unfinished)
    unfinished.replace(path)


def _train(rank: int, plan: Plan, folder: Path, store: str, faults: list[Fault]) -> None:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, plan.world_size),
        rank=rank,
        world_size=plan.world_size,
        timeout=timedelta(seconds=30),
    )
    net = build()
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, hdet.finite_mean_hook)
    # DDP orders its buckets anew after the first step of a process, and with more than two ranks that changes
    # the last bits of gradients. So that step is made here, in every process alike, and undone.
    start = copy.deepcopy(net.state_dict())
    _loss_of(model, rank, 0).backward()
    model.zero_grad()
    net.load_state_dict(start)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    auto = hdet.AutoLR(optimizer, total_steps=plan.total_steps, model=model, sync_every=plan.sync_every)
    checkpoint = folder / "checkpoints" / "last.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        auto.load_state_dict(state["auto"])
    script, loss = Faults(faults, replica=rank, happened=folder / "happened"), None
    for step in range(auto.num_steps, plan.total_steps):
        script.before_step(step, net)
        loss = script.loss(step, _loss_of(model, rank, step))
        optimizer.zero_grad()
        loss.backward()
        script.after_backward(step, net)
        optimizer.step()
        auto.step(loss)
        if (step + 1) % plan.save_every == 0:
            auto.converge()
            if rank == 0:
                parts = {"model": net, "optimizer": optimizer, "auto": auto}
                state = {name: part.state_dict() for name, part in parts.items()}
                with script.saving(step):
                    save(checkpoint, state)
    moments = {
        f"{i} {name}": value
        for i, entries in optimizer.state_dict()["state"].items()
        for name, value in entries.items()
    }
    kept = net.state_dict() if rank == 0 else {name: p.detach() for name, p in net.named_parameters()}
    save(folder / f"end-{rank}.pt", kept | moments)
    dist.barrier()
    del model, auto, loss  # torch can hang where DistributedDataParallel outlives its group
    gc.collect()
    dist.destroy_process_group()


# --- all processes ----------------------------------------------------------------------------------


def run_to_the_end(
    plan: Plan,
    folder: Path,
    faults: list[Fault],
    *,
    timeout_seconds: float,
    tell: Callable[[str], None] = lambda text: None,
) -> Result:
    """Train, and start all processes again whenever one of them ends before the run does."""
    (folder / "checkpoints").mkdir(parents=True)
    context = forkserver()
    deadline = time.monotonic() + timeout_seconds
    num_starts, is_over, pids = 0, False, set[int]()
    while not is_over:
        assert num_starts <= len(faults), f"it ends without a fault:\n{(folder / 'log').read_text()[-3000:]}"
        num_starts += 1
        store = folder / f"store-{num_starts}"
        processes = [
            context.Process(target=_train, args=(rank, plan, folder, str(store), faults), daemon=True)
            for rank in range(plan.world_size)
        ]
        try:
            for process in processes:
                process.start()
            pids |= {process.pid for process in processes if process.pid is not None}
            is_over = _wait(processes, deadline)
        finally:
            for process in processes:
                process.kill()
                process.join()
        store.unlink(missing_ok=True)
        tell(f"start {num_starts} {'reached the end' if is_over else 'was ended by a fault'}")
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "processes are left over"
    return Result(
        states=[torch.load(folder / f"end-{r}.pt", weights_only=True) for r in range(plan.world_size)],
        num_starts=num_starts,
        happened={path.name for path in (folder / "happened").iterdir()},
        files={path.name for path in (folder / "checkpoints").iterdir()},
        log=(folder / "log").read_text(),
    )


def _wait(processes: list[Any], deadline: float) -> bool:
    """Until all have ended well, or one has not; whether it was well."""
    running = list(processes)
    while running:
        if not wait([process.sentinel for process in running], timeout=deadline - time.monotonic()):
            raise TimeoutError("the run takes too long: it hangs, or the machine is busy")
        ended = [process for process in running if process.exitcode is not None]
        if any(process.exitcode for process in ended):
            return False
        running = [process for process in running if process not in ended]
    return True

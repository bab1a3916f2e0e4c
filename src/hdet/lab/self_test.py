"""Two real processes that train, sync and measure: ``python -m hdet.lab.self_test``.

The processes are started as commands of their own, so it works from any script, also one without a
``__main__`` guard. They meet through a file in a temporary folder and talk over loopback.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.checks import require_number
from hdet.errors import HdetError

NUM_RANKS = 2
NUM_FLOATS = 1_000_000
NUM_ROUNDS = 5
STEPS_PER_ROUND = 3


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """Holds what :func:`self_test` saw, in the process of replica zero. Times are medians."""

    startup_seconds: float
    """From the start of the processes to the first collective."""
    all_reduce_one_milliseconds: float
    """One float: the latency of a collective."""
    all_reduce_million_milliseconds: float
    """A million floats."""
    bandwidth_bytes_per_second: float
    """Bytes that a process sent for a million floats, over the time that they took beyond the latency."""
    converge_milliseconds: float
    """The ensemble's average of a million parameters."""
    largest_difference: float
    """Largest distance of a parameter between replicas at the end of a round, before the sync."""
    found_factor: float
    """Learning rate that a short run with ``hdet.AutoLR`` found, over the one that it started from."""


class SelfTestError(HdetError, RuntimeError):
    """The self-test failed; the message ends with the last lines of what the processes wrote."""


def self_test(*, time_limit_seconds: float = 60.0) -> SelfTest:
    """Train a small model on two gloo processes, and measure what they exchange.

    The replicas have different learning rates: their parameters must differ before every sync and be equal
    after it. Then a short run must find a learning rate. No process outlives the call.

    Args:
        time_limit_seconds: after which the processes are ended and :class:`SelfTestError` is raised.
    """
    require_number("time_limit_seconds", time_limit_seconds, above=0)
    with tempfile.TemporaryDirectory(prefix="hdet-self-test-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        logs = [folder / f"rank{rank}.log" for rank in range(NUM_RANKS)]
        processes: list[Popen[bytes]] = []
        start = partial(Popen, stdin=DEVNULL, stderr=STDOUT, cwd=folder, env=_environment())
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as out:
                    processes.append(start(_command(rank, folder, time_limit_seconds), stdout=out))
            deadline = time.monotonic() + time_limit_seconds
            while None in (codes := [p.poll() for p in processes]) and time.monotonic() < deadline:
                if any(codes):  # the other one would wait for it, but may have something to say too
                    deadline = min(deadline, time.monotonic() + 1)
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes) or None in codes:
            texts = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
            raise SelfTestError(_failure(texts, codes, time_limit_seconds))
        return SelfTest(**json.loads((folder / "report.json").read_text()))


def _command(rank: int, folder: Path, time_limit_seconds: float) -> list[str]:
    # It ends itself, a little before it would be ended: to say where it was, and if nobody is left to do it.
    # The time runs before torch is imported.
    code = (
        f"import faulthandler; faulthandler.dump_traceback_later({0.9 * time_limit_seconds}, exit=True); "
        f"import pathlib, hdet.lab.self_test as test; "
        f"test._run_rank({rank}, pathlib.Path({str(folder)!r}), {time_limit_seconds}, {time.time()})"
    )
    return [sys.executable, "-c", code]


def _environment() -> dict[str, str]:
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # gloo is tested; a busy device would only be in the way
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "",
        # The same modules as here, wherever the call comes from.
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),  # noqa: PTH100
        **({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}),
    }


def _failure(texts: Sequence[str], codes: Sequence[int | None], time_limit_seconds: float) -> str:
    parts = []
    for rank, (text, code) in enumerate(zip(texts, codes, strict=True)):
        said, is_late, where = text.partition("Timeout (")  # then faulthandler says where it was
        if is_late or (code is None and not any(codes)):
            parts.append(f"rank {rank} did not end within {time_limit_seconds:g} s")
        elif code:
            parts.append(f"rank {rank} ended with code {code}")
        else:
            continue
        # faulthandler names the main thread last, and the place where it was first.
        place = where.rpartition("Thread 0x")[2].splitlines()[1:4]
        parts += [f"  {line}" for line in [*said.splitlines()[-3 if is_late else -10 :], *place]]
    return "\n".join(parts)


# --- one of the processes ----------------------------------------------------------------------------------


def _run_rank(rank: int, folder: Path, time_limit_seconds: float, started_at: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), NUM_RANKS),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=time_limit_seconds),
    )
    dist.barrier()
    startup_seconds = time.time() - started_at
    one, million = torch.ones(1), torch.ones(NUM_FLOATS)
    one_milliseconds = _median_milliseconds(lambda: dist.all_reduce(one), 30)
    million_milliseconds = _median_milliseconds(lambda: dist.all_reduce(million), 15)
    largest_difference, converge_milliseconds = _train(rank)
    sent_bytes = 2 * (NUM_RANKS - 1) / NUM_RANKS * million.element_size() * NUM_FLOATS
    report = {
        "startup_seconds": startup_seconds,
        "all_reduce_one_milliseconds": one_milliseconds,
        "all_reduce_million_milliseconds": million_milliseconds,
        "bandwidth_bytes_per_second": 1000 * sent_bytes / max(1e-3, million_milliseconds - one_milliseconds),
        "converge_milliseconds": converge_milliseconds,
        "largest_difference": largest_difference,
        "found_factor": _find(rank),
    }
    if rank == 0:
        (folder / "report.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def _train(rank: int) -> tuple[float, float]:
    """Train some rounds: give the largest difference before a sync, and the milliseconds of one."""
    width = round(NUM_FLOATS**0.5)
    torch.manual_seed(0)
    layer = nn.Linear(width, width, bias=False)
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = hdet.Records()
    explore, every = [hdet.LearningRate(spread=0.5)], STEPS_PER_ROUND
    ensemble = hdet.Ensemble(optimizer, model=model, explore=explore, sync_every=every, records=records)
    batches = torch.Generator().manual_seed(rank)
    largest = 0.0
    for step in range(1, NUM_ROUNDS * STEPS_PER_ROUND + 1):
        loss = model(torch.randn(8, width, generator=batches)).square().mean()
        _make_step(optimizer, loss)
        before = _difference(layer.weight)
        ensemble.step(loss)
        after = _difference(layer.weight)
        if not before > 0:
            raise SelfTestError(f"step {step}: replicas have different learning rates but equal parameters")
        if after != 0 and step % every == 0:
            raise SelfTestError(f"step {step}: after the sync, parameters of the replicas differ by {after}")
        largest = max(largest, before)
    times = [record.milliseconds["converge"] for record in records[1:]]  # the first one makes the buckets
    return largest, statistics.median(times) if times else 0.0  # only replica zero has records


def _find(rank: int) -> float:
    """Train a whole run that finds its learning rate: search, save points, guard and tail."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 1)
    model = DistributedDataParallel(layer)
    start = 1e-5
    optimizer = torch.optim.Adam(model.parameters(), lr=start)
    held_out = torch.randn(64, 8, generator=torch.Generator().manual_seed(99))

    def loss_of(module: nn.Module, x: Tensor) -> Tensor:
        return (module(x) - x.sum(dim=1, keepdim=True)).square().mean()

    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(8, 8, generator=generator) for _ in range(100)]
    found = hdet.find_lr(model, optimizer, batches, loss_of, total_steps=200, probe=held_out)
    auto = hdet.AutoLR(optimizer, total_steps=200, model=model, found=found)
    for step in range(200):
        loss = loss_of(model, batches[step % 100])
        _make_step(optimizer, loss)
        auto.step(loss)
    apart = _difference(layer.weight)
    if apart != 0:
        raise SelfTestError(f"after a run with hdet.AutoLR, parameters of the replicas differ by {apart}")
    factor = auto.found_lr["lr"] / start
    if not factor > 1:
        raise SelfTestError(f"hdet.find_lr must raise a learning rate that is too low, got x{factor:.3g}")
    return factor


def _make_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _difference(parameter: Tensor) -> float:
    """Compute the largest difference of an element between the replicas."""
    mine = parameter.detach()
    everybody = [torch.empty_like(mine) for _ in range(NUM_RANKS)]
    dist.all_gather(everybody, mine)
    return max((theirs - mine).abs().max().item() for theirs in everybody)


def _median_milliseconds(act: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        act()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])


if __name__ == "__main__":
    for name, value in dataclasses.asdict(self_test()).items():
        print(f"{name}: {value:.4g}")

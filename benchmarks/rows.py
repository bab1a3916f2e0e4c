"""The rows of the benchmark: what is measured, against what."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.lab.tasks.task import load_task
from hdet.replicas import Averager, ReplicaGroup
from hdet.replicas.health import Health
from hdet.search.with_torch import find_lr
from research.compare.timing import seconds_in_turn
from research.peers import METHODS
from research.peers.base import Job, descend
from tests.helpers.replicas import run_replicas

__all__ = ["ROWS", "Row"]

NUM_RANKS = 4

STEP, STEP_MICROSECONDS = 1.75, 10.0
CONVERGE_148_TENSORS, CONVERGE_2000_TENSORS, CONVERGE_OVER_LOOP = 1.35, 1.75, 0.01
CONVERGE_MEMORY = 1.01
ADDED_WALL_CLOCK = 0.001
SEARCH_22K, SEARCH_121K = 0.120, 0.100
EXPLORED_DECAY = 1.05
RECIPE, RECIPE_THERMOSTAT, RECIPE_DECAY = 1.12, 1.20, 1.25
IMPORT = 1.1
"""All bounds that there are. A row that is in none of them is measured and reported."""


@dataclass(frozen=True)
class Row:
    """One measured ratio."""

    what: str
    ratio: float
    bound: float | None
    low: float
    high: float
    detail: str

    @property
    def holds(self) -> bool:
        """Whether the ratio is within its bound."""
        return self.bound is None or self.ratio <= self.bound

    def as_json(self) -> dict[str, Any]:
        """For results.json."""
        return asdict(self) | {"holds": self.holds}


def _row(
    what: str, bound: float | None, ours: Sequence[float], theirs: Sequence[float], unit: str = "ms"
) -> Row:
    """Ratio of medians; its spread is that of the ratios of single repeats, quartile to quartile."""
    scale = {"us": 1e6, "ms": 1e3, "s": 1.0}[unit]
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    a, b = statistics.median(ours), statistics.median(theirs)
    return Row(
        what,
        a / b,
        bound,
        ratios[len(ratios) // 4],
        ratios[-1 - len(ratios) // 4],
        f"{a * scale:.3g} against {b * scale:.3g} {unit}, {len(ratios)} repeats",
    )


# --- a step between syncs ----------------------------------------------------------------------------


def step_rows() -> list[Row]:
    """``step(loss)`` against ``OneCycleLR.step()`` and ``total += loss.detach()``."""
    warnings.simplefilter("ignore")
    rows = []
    loss = torch.tensor(2.0, requires_grad=True) * 1
    for num_groups in (1, 8):
        schedulers = []
        for scheduler_class, more in (
            (OneCycleLR, {}),
            (hdet.OneCycleAutoLR, {"ensemble_lr_spread_ratio": 1 / 9, "model_sync_interval": 10**8}),
        ):
            groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(num_groups)]
            optimizer = torch.optim.AdamW(groups, lr=1e-3)
            schedulers.append(scheduler_class(optimizer, 1e-3, total_steps=10**9, **more))
        plain, ours = schedulers

        def run_plain(plain: Any = plain) -> None:
            total = torch.zeros(())
            for _ in range(2000):
                total += loss.detach()
                plain.step()

        def run_ours(ours: Any = ours) -> None:
            for _ in range(2000):
                ours.step(loss)

        theirs_times, our_times = _interleaved([run_plain, run_ours], repeats=41)
        theirs_per_step, ours_per_step = ([t / 2000 for t in times] for times in (theirs_times, our_times))
        what = "step(loss) between syncs over OneCycleLR.step() and a running loss"
        rows.append(_row(f"{what}, {num_groups} groups", STEP, ours_per_step, theirs_per_step, "us"))
        if num_groups == 1:
            microseconds = sorted(1e6 * t for t in ours_per_step)
            what, detail = "step(loss) between syncs, in microseconds, 1 group", "41 repeats"
            low, middle, high = (microseconds[len(microseconds) * quarter // 4] for quarter in (1, 2, 3))
            rows.append(Row(what, middle, STEP_MICROSECONDS, low, high, detail))
    return rows


# --- converge ---------------------------------------------------------------------------------------


def gpt_shapes(
    width: int, vocabulary: int = 50257, context: int = 1024, layers: int = 12
) -> list[torch.Size]:
    """The 148 parameter tensors of GPT-2, at another width."""
    d = width
    block = [
        (d,),
        (d,),
        (d, 3 * d),
        (3 * d,),
        (d, d),
        (d,),
        (d,),
        (d,),
        (d, 4 * d),
        (4 * d,),
        (4 * d, d),
        (d,),
    ]
    shapes = [(vocabulary, d), (context, d), *(block * layers), (d,), (d,)]
    return [torch.Size(shape) for shape in shapes]


def _converge(rank: int, shapes: list[torch.Size], repeats: int, with_loop: bool) -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    flat = torch.randn(sum(shape.numel() for shape in shapes), generator=generator)
    averager, health = Averager(ReplicaGroup.of(None)), Health()

    def loop() -> None:  # what the reference code does
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor.div_(NUM_RANKS)

    def one_all_reduce() -> None:
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)

    def full_sync() -> None:
        health.all_finite(tensors)
        averager.average_(tensors)

    runs: list[Callable[[], None]] = [one_all_reduce, lambda: averager.average_(tensors), full_sync]
    times = _interleaved(runs, repeats, before=dist.barrier)
    result = dict(zip(("one", "ours", "sync"), times, strict=True))
    if with_loop:
        result["loop"], result["ours beside it"] = _interleaved([loop, runs[1]], 3, before=dist.barrier)
    return result


def converge_rows() -> list[Row]:
    """Averaging many tensors against one all-reduce to the mean of one tensor of the same size."""
    rows = []
    cases = [
        ("25 M parameters in 148 tensors", gpt_shapes(272), 21, CONVERGE_148_TENSORS, False),
        ("1 M parameters in 2000 tensors", [torch.Size([500])] * 2000, 101, CONVERGE_2000_TENSORS, True),
    ]
    for name, shapes, repeats, bound, with_loop in cases:
        times = run_replicas(_converge, NUM_RANKS, shapes, repeats, with_loop, timeout_seconds=600)[0]
        where = f"{NUM_RANKS} gloo ranks, {name}"
        rows.append(_row(f"converge over one all-reduce, {where}", bound, times["ours"], times["one"]))
        rows.append(
            _row(
                f"converge with the check for NaN over one all-reduce, {where}",
                None,
                times["sync"],
                times["one"],
            )
        )
        if with_loop:
            rows.append(
                _row(
                    f"converge over a loop of all-reduces, {where}",
                    CONVERGE_OVER_LOOP,
                    times["ours beside it"],
                    times["loop"],
                )
            )
    return rows


# --- memory -----------------------------------------------------------------------------------------


def _peak(rank: int, bucket_mib: float) -> float:
    tensors = [torch.randn(shape) for shape in gpt_shapes(272)]
    averager = Averager(ReplicaGroup.of(None), bucket_mib=bucket_mib)
    with torch.profiler.profile(profile_memory=True) as profile:
        Health().all_finite(tensors)
        averager.average_(tensors)
    live = peak = 0
    events = profile.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return float(peak)


def memory_rows() -> list[Row]:
    """What converge allocates at its peak, over one bucket of 25 MiB."""
    bucket = 25 * 2**20
    peaks = run_replicas(_peak, NUM_RANKS, 25.0, timeout_seconds=300)
    ratio = max(peaks) / bucket
    detail = f"{max(peaks) / 2**20:.1f} MiB against 25 MiB, the highest of {NUM_RANKS} ranks"
    return [
        Row(
            "peak extra memory of converge over one bucket",
            ratio,
            CONVERGE_MEMORY,
            min(peaks) / bucket,
            ratio,
            detail,
        )
    ]


# --- a whole run ------------------------------------------------------------------------------------


class _Transformer(nn.Module):
    def __init__(self, vocabulary: int = 256, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


def _train(rank: int, rounds: int) -> dict[str, Any]:
    """Times of a plain training step, of the two schedulers' steps, and of a sync."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = DistributedDataParallel(_Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    plain = OneCycleLR(optimizer, 1e-4, total_steps=10**7)
    other = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ensemble_scheduler = hdet.OneCycleAutoLR(
        other,
        1e-4,
        total_steps=10**7,
        ensemble_lr_spread_ratio=1 / 9,
        model_sync_interval=1000,
        enable_auto_lr=True,
        auto_lr_warmup_steps=0,
    )
    tokens = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(rank))
    times: dict[str, list[float]] = {"train": [], "plain": [], "ours": [], "sync": []}
    for _ in range(rounds):
        for _ in range(3):
            dist.barrier()
            start = time.perf_counter()
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = loss.detach().clone()
            plain.step()
            times["train"].append(time.perf_counter() - start)
        optimizer.zero_grad()  # a call that meets gradients and no step would not count
        start = time.perf_counter()
        for _ in range(999):
            total += loss.detach()
            plain.step()
        times["plain"].append((time.perf_counter() - start) / 999)
        start = time.perf_counter()
        for _ in range(999):
            ensemble_scheduler.step(loss)
        times["ours"].append((time.perf_counter() - start) / 999)
        dist.barrier()
        start = time.perf_counter()
        ensemble_scheduler.step(loss)  # the thousandth: a sync
        times["sync"].append(time.perf_counter() - start)
    return times


def run_rows() -> list[Row]:
    """Added wall-clock at T = 1000, from its parts: it is far below the noise of whole runs."""
    times = run_replicas(_train, NUM_RANKS, 15, timeout_seconds=600)[0]
    train, plain, ours, sync = (statistics.median(times[k]) for k in ("train", "plain", "ours", "sync"))
    added = 999 * (ours - plain) + (sync - plain)
    ratio = added / (1000 * train)
    low, high = (
        (999 * (ours - plain) + (sorted(times["sync"])[i] - plain)) / (1000 * train) for i in (3, -4)
    )
    detail = (
        f"step {1e6 * plain:.1f} to {1e6 * ours:.1f} us, sync {1e3 * sync:.1f} ms, "
        f"training step {1e3 * train:.0f} ms; {NUM_RANKS} ranks, 0.5 M parameters"
    )
    return [
        Row(
            "added wall-clock of spread, sync and controller at T = 1000",
            ratio,
            ADDED_WALL_CLOCK,
            low,
            high,
            detail,
        )
    ]


def _searched_jobs() -> Iterator[tuple[str, Job, float | None]]:
    """Runs of 1000 steps, each with its name and size, and the bound of its search."""
    for name, options, lr, bound in (
        ("digits", {}, 0.01, None),
        ("charlm", {}, 0.05623, SEARCH_22K),
        ("charlm", {"width": 64, "num_layers": 2, "length": 64}, 0.01778, SEARCH_121K),
        ("feed", {}, 0.01, None),
    ):
        task = load_task(name, options)
        size = sum(p.numel() for p in task.build_model(0).parameters())
        job = Job(task=task, start_lr=lr, steps=1000, seed=0, num_replicas=8, optimizer_kind="adamw")
        yield f"{name} with {size:,} parameters", job, bound


def search_rows() -> list[Row]:
    """find_lr alone, for a run of 1000 steps, against these 1000 steps."""
    torch.set_num_threads(1)
    rows = []
    for name, job, bound in _searched_jobs():
        ours, plain = [], []
        for _ in range(7):
            model = job.build_model()
            optimizer = job.optimizer(model, job.start_lr)
            start = time.perf_counter()
            find_lr(model, optimizer, job.batches(), job.task.loss, total_steps=job.steps)
            ours.append(time.perf_counter() - start)
            start = time.perf_counter()
            descend(job, model, optimizer, job.batches(), job.steps // 10)
            plain.append(10 * (time.perf_counter() - start))
        rows.append(
            _row(f"find_lr over the 1000 plain steps that it is for, {name}", bound, ours, plain, "s")
        )
    return rows


def finder_rows() -> list[Row]:
    """find_lr and AutoLR against plain training of as many steps in all: whole runs in turn."""
    torch.set_num_threads(1)
    rows = []
    for name, job, _ in _searched_jobs():
        methods = [METHODS["plain_linear"], METHODS["hdet_find"]]
        seconds_in_turn(methods[:1], replace(job, steps=20))
        pairs = [seconds_in_turn(methods, job) for _ in range(3)]
        plain, ours = ([seconds or math.nan for seconds in column] for column in zip(*pairs, strict=True))
        what = f"a run that finds its learning rate over a plain one of as many steps, {name}"
        rows.append(_row(f"{what}, 1000 steps", None, ours, plain, "s"))
    return rows


def decay_rows() -> list[Row]:
    """A run that explores weight decay against one that does not: two runs that take turns every 50 steps."""
    torch.set_num_threads(1)
    task = load_task("charlm", {"width": 64, "num_layers": 2, "length": 64, "batch_size": 16})
    rows = []
    for num_replicas, bound in ((8, EXPLORED_DECAY), (2, None)):
        job = Job(
            task=task, start_lr=0.01, steps=1000, seed=0, num_replicas=num_replicas, optimizer_kind="adamw"
        )
        held_out = list(islice(replace(job, seed=1).batches(), 256 // (16 * num_replicas)))
        runs = [_decay_run(job, held_out), _decay_run(job, None)]
        ours, plain = _interleaved([partial(next, run) for run in runs], repeats=19)
        size = sum(p.numel() for p in task.build_model(0).parameters())
        what = f"a run of 1000 steps that explores weight decay over one that does not, charlm with {size:,}"
        per_run = [sum(times) for times in (ours, plain)]
        row = _row(f"{what} parameters, batches of {16 * num_replicas}", bound, ours, plain)
        rows.append(replace(row, ratio=per_run[0] / per_run[1]))  # looks are in some of the turns only
    return rows


def _decay_run(job: Job, held_out: Sequence[Any] | None) -> Iterator[None]:
    """One run; every step of the iterator is 50 of its steps."""
    model = job.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.start_lr, weight_decay=0.1)
    told = {}
    if held_out is not None:
        told = {"controllers": [hdet.HeldOutWeightDecay()], "probe": hdet.Probe(held_out, job.task.loss)}
    auto = hdet.AutoLR(optimizer, total_steps=job.steps, model=model, **told)
    for step, batch in enumerate(job.batches(), 1):
        loss = job.task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)
        if step % 50 == 0:
            yield


# --- the recipe where there is next to nothing to do ---------------------------------------------------

_SMALL_STEPS, _SMALL_BLOCK = 600, 60


def recipe_rows() -> list[Row]:
    """AutoLR against OneCycleLR on a small model: whole runs in CPU time, which take turns block by block."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32 * _SMALL_STEPS, 64, generator=generator)
    labels = (inputs @ torch.randn(64, 10, generator=generator)).argmax(dim=1)
    batches = list(zip(inputs.split(32), labels.split(32), strict=True))
    probe = hdet.Probe(batches[:8], _small_loss)
    thermostat = [hdet.Thermostat()]
    cases = {
        "AutoLR": (RECIPE, []),
        "AutoLR with a thermostat": (RECIPE_THERMOSTAT, thermostat),
        "AutoLR with a thermostat and held-out weight decay": (
            RECIPE_DECAY,
            [*thermostat, hdet.HeldOutWeightDecay()],
        ),
    }
    seconds: dict[str, list[float]] = {}
    for _ in range(16):
        runs = {name: _small_run(batches, told, probe) for name, (_, told) in cases.items()}
        runs["OneCycleLR"] = _small_run(batches, None, probe)
        blocks = zip(*runs.values(), strict=True)
        for name, parts in zip(runs, zip(*blocks, strict=True), strict=True):
            seconds.setdefault(name, []).append(sum(parts) / _SMALL_STEPS)
    seconds = {name: each[1:] for name, each in seconds.items()}  # the first turn does not count
    where = "MLP of 5.7k parameters, batch 32, 600 steps, CPU time of a step"
    plain = seconds["OneCycleLR"]
    return [
        _row(f"AdamW + {name} over AdamW + OneCycleLR, {where}", bound, seconds[name], plain, "us")
        for name, (bound, _) in cases.items()
    ]


def _small_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _small_run(
    batches: Sequence[Any], controllers: Sequence[Any] | None, probe: hdet.Probe
) -> Iterator[float]:
    """One run, with OneCycleLR where controllers are None. It yields the CPU time of every block of steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 76), nn.ReLU(), nn.Linear(76, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    is_plain = controllers is None
    told = {"controllers": controllers, "probe": probe} if controllers else {}
    scheduler: Any = (
        OneCycleLR(optimizer, 3e-3, total_steps=_SMALL_STEPS)
        if is_plain
        else hdet.AutoLR(optimizer, total_steps=_SMALL_STEPS, model=model, **told)
    )
    for first in range(0, _SMALL_STEPS, _SMALL_BLOCK):
        start = time.process_time()
        for batch in batches[first : first + _SMALL_BLOCK]:
            loss = _small_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            _ = scheduler.step() if is_plain else scheduler.step(loss)
        yield time.process_time() - start


# --- virtual replicas -------------------------------------------------------------------------------


class _CharModel(nn.Module):
    """A causal character model of two layers."""

    def __init__(self, width: int, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.token, self.place = nn.Embedding(96, width), nn.Embedding(length, width)
        self.attention = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.feed = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, 96)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[-1]))
        for attention, feed in zip(self.attention, self.feed, strict=True):
            q, k, v, gate = attention(x).chunk(4, dim=-1)
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for t in (q, k, v))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + y.transpose(-3, -2).flatten(-2) * gate.sigmoid()
            x = x + feed(x)
        return self.head(x)


def _char_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def virtual_rows() -> list[Row]:
    """Eight virtual replicas against eight models with torch's own AdamW, one after the other."""
    rows = []
    for width, name in ((32, "30k"), (120, "400k")):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        batches = [torch.randint(96, (1, 32), generator=generator) for _ in range(8)]
        models = [_CharModel(width) for _ in range(8)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]

        def sequential(models: Any = models, optimizers: Any = optimizers, batches: Any = batches) -> None:
            for model, optimizer, batch in zip(models, optimizers, batches, strict=True):
                optimizer.zero_grad()
                _char_loss(model, batch).backward()
                optimizer.step()

        template = _CharModel(width)
        size = sum(p.numel() for p in template.parameters())
        ensemble = hdet.VirtualEnsemble(
            template,
            torch.optim.AdamW(template.parameters(), lr=1e-3),
            _char_loss,
            num_replicas=8,
            gradients="local",
            sync_every=10**6,
        )

        def virtual(ensemble: Any = ensemble, batches: Any = batches) -> None:
            ensemble.step(batches=batches)

        one_by_one, together = _interleaved([sequential, virtual], repeats=21)
        what = f"8 virtual replicas over 8 sequential models, {name} ({size:,}) parameters, 32 tokens each"
        rows.append(_row(what, None, together, one_by_one))
    return rows


# --- import -----------------------------------------------------------------------------------------


def import_rows() -> list[Row]:
    """Importing torch and hdet, of which one name is used, against ``import torch``, in fresh processes."""

    def run(code: str) -> Callable[[], None]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True) and None

    torch_only, both = _interleaved(
        [run("import torch"), run("import torch, hdet; hdet.OneCycleAutoLR")], repeats=15
    )
    return [_row("import torch, hdet over import torch", IMPORT, both, torch_only, "s")]


def _interleaved(
    runs: Sequence[Callable[[], None]], repeats: int, before: Callable[[], Any] = lambda: None
) -> list[list[float]]:
    """Times of each run; they take turns, and the first turn does not count."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats + 1):
        for i, run in enumerate(runs):
            before()
            start = time.perf_counter()
            run()
            times[i].append(time.perf_counter() - start)
    return [each[1:] for each in times]


ROWS: dict[str, Callable[[], list[Row]]] = {
    "step": step_rows,
    "converge": converge_rows,
    "memory": memory_rows,
    "run": run_rows,
    "search": search_rows,
    "finders": finder_rows,
    "decay": decay_rows,
    "recipe": recipe_rows,
    "virtual": virtual_rows,
    "import": import_rows,
}

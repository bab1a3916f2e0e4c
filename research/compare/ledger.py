"""Ledger: every run of a comparison as one JSON line, and the runs that add to it."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import hdet
from hdet.errors import HdetError
from hdet.lab.pool import Pool
from hdet.lab.tasks.task import Task, load_task
from research.compare.timing import seconds_in_turn
from research.peers import METHODS
from research.peers.base import Job

__all__ = [
    "SWEEP",
    "Ledger",
    "Record",
    "finishing",
    "read_ledger",
    "run_missing",
    "task_of",
    "timed_in_turn",
    "train_one",
]

Record = dict[str, Any]

SWEEP = "sweep"
"""Name of a point of the sweep: a run of ``plain_linear`` that has a learning rate but no start."""

_KEY = ("task", "task_options", "optimizer", "method", "start", "seed", "steps", "replicas", "lr")


def _key(record: Mapping[str, Any], names: Sequence[str]) -> str:
    return json.dumps([record[name] for name in names], sort_keys=True)


def read_ledger(path: Path, key: Sequence[str] = _KEY, result: str = "diverged") -> dict[str, Record]:
    """The runs of a file of JSON lines by what they are; lines that a crash cut short are left out.

    Args:
        path: the file.
        key: the fields that tell one run from another.
        result: a field that a run has beside ``final_loss`` and ``seconds`` when it is done.
    """
    records = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        record = _parsed(line)
        if isinstance(record, dict) and {*key, "final_loss", "seconds", result} <= record.keys():
            records[_key(record, key)] = record
    return records


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


class Ledger:
    """The runs of a folder, one line each.

    Args:
        folder: is made if it is not there.
        name: of the file.
        key: see :func:`read_ledger`.
        result: see :func:`read_ledger`.
    """

    def __init__(
        self,
        folder: Path,
        name: str = "compare.jsonl",
        key: Sequence[str] = _KEY,
        result: str = "diverged",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._names = folder / name, key
        self._records = read_ledger(self.path, key, result)

    @property
    def records(self) -> list[Record]:
        """All runs."""
        return list(self._records.values())

    def find(self, specs: Iterable[Mapping[str, Any]]) -> Iterator[Record]:
        """Those of these runs that are there."""
        return (self._records[_key(spec, self._names)] for spec in specs if spec in self)

    def __contains__(self, spec: Mapping[str, Any]) -> bool:
        return _key(spec, self._names) in self._records

    def add(self, record: Record) -> None:
        """Append a run, complete on disk before this returns; one that is there already gives way."""
        record = {"hdet": hdet.__version__} | ({"commit": _commit()} if _commit() else {}) | record
        line = json.dumps(record, allow_nan=False) + "\n"
        is_cut = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * is_cut + line)
            file.flush()
            os.fsync(file.fileno())
        self._records[_key(record, self._names)] = json.loads(line)  # as it will be read


def run_missing(
    specs: Sequence[Record],
    ledger: Ledger,
    pool: Pool,
    *,
    train: Callable[[Record], Record] | None = None,
    on_done: Callable[[], None] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Run what a ledger does not have yet, several at a time; whether all is there in the end.

    Args:
        specs: the runs: records without results.
        ledger: where results go.
        pool: whose processes run; one run at a time, or a single one, runs in this process.
        train: makes a spec a record, a function that a process can import; None for a run of a peer.
        on_done: called after every run.
        should_stop: asked now and then.
    """
    jobs = [(spec, train) for spec in specs if spec not in ledger]
    is_interrupted = False

    def is_stopped() -> bool:
        return is_interrupted or should_stop()

    if pool.num_jobs == 1 or len(jobs) == 1:
        found = (train_one(*job) for job in jobs if not is_stopped())
    else:
        found = (record for _, record in pool.run(train_one, jobs, should_stop=is_stopped))
    for record in found:
        if record is None:
            is_interrupted = True
        else:
            ledger.add(record)
            on_done()
    return all(spec in ledger for spec in specs)


@contextmanager
def finishing(
    ledger: Ledger,
    train: Callable[[Record], Record],
    num_jobs: int,
    on_done: Callable[[int, int], None],
    should_stop: Callable[[], bool],
) -> Iterator[Callable[[list[Record]], bool]]:
    """Give a function that runs what a ledger does not have yet, and tells if all is there in the end.

    Args:
        ledger: where results go.
        train: makes a spec a record, a function that a process can import.
        num_jobs: runs at a time; 0 for one per core.
        on_done: called with the number of runs done, and that of all as far as it is known.
        should_stop: asked now and then.
    """
    done = total = 0

    def count() -> None:
        nonlocal done
        done += 1
        on_done(done, total)

    with Pool(num_jobs) as pool:

        def finish(specs: list[Record]) -> bool:
            nonlocal total
            total += sum(spec not in ledger for spec in specs)
            return run_missing(specs, ledger, pool, train=train, on_done=count, should_stop=should_stop)

        yield finish


def train_one(spec: Record, train: Callable[[Record], Record] | None = None) -> Record | None:
    """Run one, with ``train`` or as a peer; None if a Ctrl-C ended it."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler) if is_main else None
    try:
        return (train or _train_one)(spec)
    except KeyboardInterrupt:
        return None
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


def _train_one(spec: Record) -> Record:
    task = task_of(spec)
    method = METHODS["plain_linear" if spec["method"] == SWEEP else spec["method"]]
    lr = task.learning_rate if spec["lr"] is None else spec["lr"]
    try:
        outcome = method.train(task, lr, spec["steps"], spec["seed"], spec["replicas"], spec["optimizer"])
    except ValueError as error:
        raise HdetError(f"method {spec['method']!r} cannot run: {error}") from error
    found = outcome.found_lr
    return spec | {
        "final_loss": outcome.final_loss if math.isfinite(outcome.final_loss) else None,
        "found_lr": found if found is not None and math.isfinite(found) else None,
        "seconds": outcome.seconds,
        "diverged": outcome.diverged,
    }


def timed_in_turn(record: Record) -> Record:
    """A run's record, with its wall-clock over that of a plain run that takes turns with it."""
    task = task_of(record)
    job = Job(
        task=task,
        start_lr=task.learning_rate if record["lr"] is None else record["lr"],
        steps=record["steps"],
        seed=record["seed"],
        num_replicas=record["replicas"],
        optimizer_kind=record["optimizer"],
    )
    plain = METHODS["plain_linear"]
    seconds_in_turn([plain], replace(job, steps=5))  # the first steps of a process take their time
    ours, theirs = seconds_in_turn([METHODS[record["method"]], plain], job)
    return record if ours is None or theirs is None else record | {"relative_seconds": ours / theirs}


def task_of(spec: Mapping[str, Any]) -> Task:
    """The task of a run, made once per process."""
    return _task(spec["task"], json.dumps(spec["task_options"], sort_keys=True))


@functools.lru_cache(maxsize=8)
def _task(name: str, options: str) -> Task:
    return load_task(name, json.loads(options))


@functools.lru_cache(maxsize=1)
def _commit() -> str | None:
    """The commit of a checkout that runs; None for an installed package."""
    root = Path(hdet.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None

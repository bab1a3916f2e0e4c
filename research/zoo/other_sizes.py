"""Does the learning rate that was found hold in longer runs, for larger models, on fewer replicas?

    python -m research.zoo.other_sizes            # run what is missing, then print the table
    python -m research.zoo.other_sizes --table    # only the table, from the saved records

Every case is trained with five learning rates a factor of 2.37 apart, and more while the best is at an end.
Then it is searched for from a guess ten times below and ten times above the best, with the search on top.
All runs have the schedule of ``hdet.AutoLR``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from hdet.lab.pool import Pool, stop_on_signal
from hdet.lab.tasks.charlm import CharLM
from hdet.lab.tasks.task import Task
from hdet.method.fan_out import derived_seed
from hdet.method.recipe import Recipe
from research.compare.ledger import Ledger, Record, run_missing
from research.markdown import table_line
from research.peers import METHODS
from research.peers.base import Diverged, Job, Trained
from research.peers.plain import plain_run
from research.zoo.catalogue import problem_of
from research.zoo.experiment import loss_of
from research.zoo.sweep import lr_at

__all__ = ["CASES", "Case", "table"]

_FOLDER = Path(__file__).parent / "records"
_KEY = ("problem", "method", "start", "lr", "seed")
_SWEEP, _FOUND = "sweep", "hdet_find_on_top"
_STRIDE = 3
"""Places of the zoo's lattice between two learning rates."""
_STARTS = (0.1, 10.0)


@dataclass(frozen=True)
class Case:
    """A problem and the length of its runs."""

    num_steps: int
    middle: int
    """Place on the lattice around which the sweep begins."""
    num_replicas: int
    seeds: tuple[int, ...] = (0, 1)
    charlm: tuple[int, int] | None = None
    """Width and number of layers; None for a problem of the zoo."""
    problem: str | None = None
    """Of the zoo; None for that of the case's name."""


CASES = {
    "movies_factorization": Case(10_000, -3, 2),
    "flights_tables": Case(10_000, -17, 8),
    "charlm_400k": Case(3000, -15, 1, charlm=(104, 3)),
    "charlm_2m": Case(3000, -21, 1, charlm=(208, 4)),
} | {
    f"{name}_on_{count}": Case(num_steps, middle, count, problem=name)
    for name, num_steps, middle in (
        ("chars_gpt", 1000, -12),
        ("flights_tables", 1500, -18),
        ("language_conv", 700, -6),
    )
    for count in (1, 2, 8)
}


@cache
def _task(name: str) -> Task:
    sizes = CASES[name].charlm
    if sizes is None:
        return problem_of(CASES[name].problem or name)
    return CharLM(width=sizes[0], num_layers=sizes[1], num_heads=4, length=64)


def train(spec: Record) -> Record:
    """Run one, and add its results."""
    case, began = CASES[spec["problem"]], time.monotonic()
    job = Job(
        task=_task(spec["problem"]),
        start_lr=spec["lr"],
        steps=case.num_steps,
        seed=spec["seed"],
        num_replicas=case.num_replicas,
        optimizer_kind="adamw",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(spec["seed"], "training"))
        try:
            if spec["method"] == _SWEEP:
                shape = {"anneal_to": Recipe.anneal_to, "average_tail": Recipe.average_tail}
                trained = plain_run(job, warmup=Recipe.warmup, **shape)
            else:
                trained = METHODS[_FOUND].run(job)
        except Diverged:
            trained = Trained({})
    loss = trained.metrics.get("loss", math.nan)
    return spec | {
        "final_loss": loss if math.isfinite(loss) else None,
        "found_lr": trained.found_lr,
        "search_steps": trained.search_steps,
        "seconds": round(time.monotonic() - began, 3),
    }


def _swept(records: Sequence[Record], name: str) -> dict[int, float]:
    """Mean loss of every place that has all its seeds."""
    losses: dict[int, list[float]] = {}
    for record in records:
        if (record["problem"], record["method"]) == (name, _SWEEP):
            losses.setdefault(round(8 * math.log10(record["lr"])), []).append(loss_of(record))
    count = len(CASES[name].seeds)
    return {place: statistics.fmean(found) for place, found in losses.items() if len(found) == count}


def _next(records: Sequence[Record], name: str) -> list[Record]:
    """Say what comes next of a case; nothing when it is done."""
    case, losses = CASES[name], _swept(records, name)
    places = [case.middle + _STRIDE * k for k in range(-2, 3)]
    if losses and {*places} <= losses.keys():
        best = min(losses, key=losses.__getitem__)
        if best not in (min(losses), max(losses)):
            return [
                _spec(name, _FOUND, start, float(f"{start * lr_at(best):.6g}"), seed)
                for start in _STARTS
                for seed in case.seeds
            ]
        places = [best - _STRIDE if best == min(losses) else best + _STRIDE]
    return [_spec(name, _SWEEP, None, lr_at(place), seed) for place in places for seed in case.seeds]


def _spec(name: str, method: str, start: float | None, lr: float, seed: int) -> Record:
    return dict(zip(_KEY, (name, method, start, lr, seed), strict=True))


def table(records: Sequence[Record]) -> str:
    """Markdown: each case with its sweep and what was found."""
    head = ["case", "parameters", "replicas", "steps", "best LR of the sweep", "found from x0.1", "from x10"]
    head += ["loss over the best: x0.1", "x10", "search, share of the steps"]
    lines = [table_line(head), table_line(["---"] + ["---:"] * 9)]
    for name, case in CASES.items():
        losses = _swept(records, name)
        runs = [
            [r for r in records if (r["problem"], r["method"], r["start"]) == (name, _FOUND, start)]
            for start in _STARTS
        ]
        if not all(runs):
            continue
        best = min(losses, key=losses.__getitem__)
        count = sum(p.numel() for p in _task(name).build_model(0).parameters())
        found = [statistics.geometric_mean([r["found_lr"] for r in some]) for some in runs]
        over = [statistics.fmean(loss_of(r) for r in some) / losses[best] for some in runs]
        share = max(r["search_steps"] for some in runs for r in some) / case.num_steps
        cells = [name, f"{count}", f"{case.num_replicas}", f"{case.num_steps}", f"{lr_at(best):g}"]
        cells += [f"{lr:.3g}" for lr in found]
        lines.append(table_line([*cells, *(f"{ratio:.3f}" for ratio in over), f"{100 * share:.1f} %"]))
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="print the table from saved records only")
    parser.add_argument("--only-sweeps", action="store_true", help="leave the searches for later")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time (default: one per core)")
    parser.add_argument("--out", type=Path, default=_FOLDER, help="folder of the records")
    args = parser.parse_args()
    ledger = Ledger(args.out, "other_sizes.jsonl", _KEY, result="search_steps")
    if not args.table:
        with stop_on_signal() as should_stop, Pool(args.jobs) as pool:
            while specs := [
                spec
                for name in args.cases.split(",")
                for spec in _next(ledger.records, name)
                if spec not in ledger and not (args.only_sweeps and spec["method"] == _FOUND)
            ]:
                if not run_missing(specs, ledger, pool, train=train, should_stop=should_stop):
                    break
    print(table(ledger.records))


if __name__ == "__main__":
    main()

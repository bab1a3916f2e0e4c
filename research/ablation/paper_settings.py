"""The ablation at the paper's settings: long rounds, a late controller, temperature .1, High nine times Low.

    python -m research.ablation.paper_settings research/ablation/records/paper-settings --seeds 3
    python -m research.ablation.paper_settings research/ablation/records/paper-settings --every 1000 --seeds 3
    python -m research.ablation.paper_settings research/ablation/records/paper-settings --model large
    python -m research.ablation.paper_settings research/ablation/records/paper-settings --table

A run has 100 rounds, 20,000 steps at T = 200. The controller begins after a third of it. Runs that are
there are not made again, so that a command that was stopped goes on.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

from hdet.lab.ablation import EQUAL, FULL, TABLE_1, mean_text
from hdet.lab.intervals import Runs, compare
from hdet.lab.tasks.feed import Feed
from hdet.lab.tasks.feed_world import Events
from hdet.lab.tasks.task import batch_generator
from research.ablation.training import train
from research.compare.ledger import Ledger, Record
from research.compare.summary import CASE
from research.markdown import table_line

__all__ = ["Stream", "specs", "table"]

ROUNDS = 100
_BLOCK = 128
"""Steps whose events are drawn at once, which takes little longer than those of one."""
_SMALL = {"batch_size": 4, "length": 8, "width": 8, "num_layers": 1, "num_heads": 1}
MODELS = {
    "small": _SMALL | {"num_users": 128, "num_items": 128},
    "large": {"width": 32, "num_users": 16384, "num_items": 16384},
}
"""3,147 and 1.1 million parameters."""


@dataclass(frozen=True, kw_only=True)
class Stream(Feed):
    """The feed, whose training batches are drawn for many steps at once. They never repeat.

    With ``burst_every`` the log is spoilt from the middle of the year on: in one step of so many, for all
    replicas, every user does everything.
    """

    burst_every: int = 0

    def train_batches(self, *, seed: int, replica: int = 0, start: int = 0) -> Iterator[Events]:
        """See :class:`Task`."""
        for block in itertools.count(start // _BLOCK):
            generator = batch_generator(seed, replica, block)
            steps = block * _BLOCK + torch.arange(_BLOCK).repeat_interleave(self.batch_size)
            times = (
                steps % self.steps_per_year + torch.rand(len(steps), generator=generator)
            ) / self.steps_per_year
            events = self._world.events(len(steps), self.length, times=times, generator=generator)
            if self.burst_every:
                place = steps % self.steps_per_year
                spoilt = (place > self.steps_per_year // 2) & (place % self.burst_every == 0)
                events["actions"][spoilt] = 1.0
            for i in range(max(0, start - block * _BLOCK), _BLOCK):
                rows = slice(i * self.batch_size, (i + 1) * self.batch_size)
                yield pytree.tree_map(lambda values, rows=rows: values[rows], events)


_ONE_CYCLE = {"anneal": "cosine", "warmup": 0.3}
"""OneCycleLR as torch has it."""
_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "hdet_.002": ("HDET (full), checkpoint, temperature .002", {"temperature": 0.002}),
}

_FIRST = ("plain", "grid", "hdet_no_warm_start", FULL, EQUAL, "plain_checkpoint")
"""Rows that tell most, for a run that is stopped early."""


def specs(
    seeds: Sequence[int],
    *,
    every: int = 200,
    model: str = "small",
    high: float = 0.027,
    burst_every: int = 0,
) -> list[Record]:
    """The runs of every row of Table 1, and of those beside it, seed by seed."""
    steps, bursts = ROUNDS * every, {"burst_every": burst_every} if burst_every else {}
    base: Record = {
        "task": "research.ablation.paper_settings:Stream",
        "task_options": MODELS[model] | {"steps_per_year": steps} | bursts,
        "optimizer": "adam",
        "steps": steps,
        "replicas": 8,
    }
    changes = {"sync_every": every, "controller_start": steps // 3, "temperature": 0.1} | _ONE_CYCLE
    rows = {row.key: (row.settings, row.share, changes) for row in TABLE_1}
    rows |= {key: (*rows[FULL][:2], changes | more) for key, (_, more) in _MORE.items()}
    found = []
    for seed in seeds:
        for key in (*_FIRST, *(key for key in rows if key not in _FIRST)):
            settings, share, changed = rows[key]
            its = {
                name: value for name, value in changed.items() if key[:4] != "warm" or name != "sync_every"
            }
            found.append(
                base | {"row": key, "lr": high * share, "seed": seed, "settings": settings(steps, **its)}
            )
    return found


def names() -> dict[str, str]:
    """What the rows are called."""
    return {row.key: row.name for row in TABLE_1} | {key: name for key, (name, _) in _MORE.items()}


def table(records: Sequence[Record]) -> str:
    """A table for each length and model, and what the tests say of the full method."""
    parts = []
    for case in dict.fromkeys(map(_case, records)):
        group = [record for record in records if _case(record) == case]
        rows = {key: [r for r in group if r["row"] == key] for key in names()}
        seeds = len({record["seed"] for record in group})
        parts += [f"### {case}, {seeds} seed{'s' * (seeds > 1)}", ""]
        heads = ["row", "LR", "held-out loss", "training loss", "AUC", "NE", "crashed"]
        parts += [table_line(heads), table_line(["---", *["---:"] * 6])]
        parts += [_line(names()[key], runs) for key, runs in rows.items() if runs]
        parts += ["", *_told({key: _outcomes(runs) for key, runs in rows.items()}), ""]
    return "\n".join(parts)


def _case(record: Record) -> str:
    options = record["task_options"]
    size = next(name for name, option in MODELS.items() if option["width"] == options["width"])
    bursts = f", a burst every {options['burst_every']}" if "burst_every" in options else ""
    return f"{size} model, {record['steps']} steps, T = {record['steps'] // ROUNDS}{bursts}"


def _line(name: str, runs: Sequence[Record]) -> str:
    ends = [[loss for _, loss in run["train_losses"][-5:]] for run in runs if not run["crashed"]]
    columns = [[run["final_loss"] for run in runs if run["final_loss"] is not None]]
    columns += [[statistics.fmean(end) for end in ends]]  # of the last twentieth
    columns += [[run["metrics"][key] for run in runs if key in run["metrics"]] for key in ("auc", "ne")]
    crashed = f"{sum(run['crashed'] for run in runs)}/{len(runs)}"
    return table_line(
        [name, f"{runs[0]['lr']:.3g}", *(mean_text(values) or "-" for values in columns), crashed]
    )


def _outcomes(runs: Sequence[Record]) -> Runs:
    return {
        run["seed"]: (math.nan if run["final_loss"] is None else run["final_loss"], run["crashed"])
        for run in runs
    }


def _told(outcomes: Mapping[str, Runs]) -> Iterator[str]:
    full = outcomes[FULL]
    for key in ("plain", "grid", "plain_checkpoint", EQUAL, "hdet_no_controller_checkpoint", *_MORE):
        if full and outcomes[key]:
            sign, why = compare(full, outcomes[key])
            words = {1: "is better than", 0: "cannot be told from", -1: "is worse than"}[sign]
            yield f"- {names()[FULL]} {words} {names()[key]}: {why}."


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=200, help="steps per round, T; a run has 100 rounds")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--high", type=float, default=0.027, help="the high learning rate; Low is a ninth")
    parser.add_argument(
        "--burst-every", type=int, default=0, help="spoil one step in so many, late in the run"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print what is there, without running")
    told = parser.parse_args()
    key = (*CASE, "row", "lr", "seed", "settings")
    ledger = Ledger(told.folder, "ablation.jsonl", key, "crashed")
    if not told.table:
        asked = {name: getattr(told, name) for name in ("every", "model", "high", "burst_every")}
        for spec in specs(range(told.seeds), **asked):
            if spec not in ledger:
                ledger.add(train(spec))
    print(table(ledger.records))


if __name__ == "__main__":
    main()

"""Why the full method recovers on charlm at High where equal replicas with the same decay do not.

    python -m research.ablation.recovery research/ablation/records/recovery
    python -m research.ablation.recovery research/ablation/records/recovery --table

Every arm has the task, length and learning rate of the record of charlm, and seeds that no record has. Some
arms need what no setting does: replicas that keep their multipliers, a signal without information, and plain
runs that follow the learning rates that the full method has found.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hdet.ensemble import sync
from hdet.lab.ablation import (
    RESIDUAL,
    Training,
    controller_start,
    decay_shape,
    mean_text,
    method_settings,
    train,
)
from hdet.lab.intervals import fisher
from hdet.lab.train.runner import evaluate
from hdet.method import controller
from hdet.method.fan_out import assign, derived_seed
from hdet.method.recipe import one_cycle
from research.ablation.rules import is_lost, judge
from research.ablation.training import job_of, thinned
from research.compare.ledger import Ledger, Record
from research.markdown import table_line
from research.peers.base import Diverged, descend

__all__ = ["ARMS", "run", "table"]

STEPS, LR = 500, 1.0
BASE: Record = {
    "task": "charlm",
    "task_options": {},
    "optimizer": "adamw",
    "lr": LR,
    "steps": STEPS,
    "replicas": 8,
}
SEEDS = range(100, 110)
MORE_SEEDS = range(100, 120)
"""Of the arms that decide."""
FULL = "full"
BEST_LOSS = 1.9695
"""Of the best plain learning rate in the record of charlm."""
_FILE, _KEY = "recovery.jsonl", ("row", "seed")


@contextlib.contextmanager
def _kept(seed: int) -> Iterator[None]:
    """Give every replica the multipliers of the first round for good."""

    def first(design: str, count: int, seed: int, _: int, names: Sequence[str], *rest: int) -> Any:
        return assign(design, count, seed, 0, names, *rest)

    with patch.object(sync, "assign", first):
        yield


@contextlib.contextmanager
def _shuffled(seed: int) -> Iterator[None]:
    """Give the weights of the replicas to others, drawn anew at every sync: as large, but without a cause."""
    generator, weigh = random.Random(seed), controller.softmax_weights

    def weights(losses: Sequence[float], temperature: float) -> list[float]:
        found = weigh(losses, temperature)
        generator.shuffle(found)
        return found

    with patch.object(controller, "softmax_weights", weights):
        yield


def _as_is(seed: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Arm:
    """One way to train. ``ends`` and ``follows`` are of plain runs, the other fields of replicas."""

    key: str
    name: str
    changes: Mapping[str, Any] | None = None
    """What differs from the full method; None for a plain run."""
    patched: Callable[[int], contextlib.AbstractContextManager[None]] = _as_is
    ends: Mapping[str, float] | None = None
    """Where the learning rate of each group ends, over the peak; None for the linear anneal to zero."""
    follows: int | None = None
    """Follow the rates that the full method found with the seed that is so many places further on."""
    is_decisive: bool = False
    is_extra: bool = False


_GROUPS = ("embedding", "no_decay", "non_embedding", "transformer")
_LOWER = 0.083
"""Where biases and norms end with the full method in the record: the mean of ten seeds."""

_OTHERS = dict.fromkeys(_GROUPS, _LOWER) | {"no_decay": RESIDUAL}

ARMS = (
    Arm(FULL, "full method", {}, is_decisive=True),
    Arm("equal", "equal replicas, same decay", {"spread": 0.0}, is_decisive=True),
    Arm("shuffled", "full, weights given to other replicas", {}, _shuffled, is_decisive=True),
    Arm("follow", "plain with the rates that this seed found", follows=0, is_decisive=True),
    Arm("low_biases", "plain, biases and norms decay to 8 %", ends={"no_decay": _LOWER}, is_decisive=True),
    Arm("spread_drawn", "spread without controller", {"end": None}),
    Arm("kept", "full, multipliers kept", {}, _kept),
    Arm("sigma_.1", "full, temperature .1", {"temperature": 0.1}),
    Arm("sigma_.002", "full, temperature .002", {"temperature": 0.002}),
    Arm("low_all", "plain, all groups decay to 8 %", ends=dict.fromkeys(_GROUPS, _LOWER)),
    Arm("low_others", "plain, all but biases and norms decay to 8 %", ends=_OTHERS),
    Arm("follow_other", "plain with the rates that another seed found", follows=1),
    Arm("plain", "plain, linear anneal to zero", is_extra=True),
    Arm("spread", "spread without controller, multipliers kept", {"end": None}, _kept),
    Arm("no_noise", "full without noise on the start", {"noise_scale": 0.0}, is_extra=True),
    Arm("together", "full, one learning rate for all groups", {"per_group": False}, is_extra=True),
)


def run(folder: Path, arms: Sequence[Arm] = ARMS, seeds: Sequence[int] = SEEDS) -> None:
    """Run what is not there yet, seed by seed."""
    ledger = Ledger(folder, _FILE, _KEY, "crashed")
    for place, seed in enumerate(seeds):
        for arm in arms:
            spec = BASE | {"row": arm.key, "seed": seed, "settings": {}}
            if spec in ledger:
                continue
            rates: dict[str, list[list[float]]] = {}
            if arm.follows is not None:
                wanted = BASE | {"row": FULL, "seed": seeds[(place + arm.follows) % len(seeds)]}
                if wanted not in ledger:
                    continue  # it comes with a later call
                rates = next(ledger.find([wanted]))["lrs"]
            ledger.add(_train(arm, spec, rates))


def _train(arm: Arm, spec: Record, rates: Mapping[str, Sequence[Sequence[float]]]) -> Record:
    if arm.changes is None:
        done = _plain(arm, spec, rates)
    else:
        settings = method_settings(STEPS, **arm.changes)
        names = ("task", "task_options", "lr", "steps", "replicas", "optimizer", "seed")
        with arm.patched(spec["seed"]):
            done = train(job_of(spec).task, {name: spec[name] for name in names}, settings)
    judged = judge(
        done.losses,
        num_warmup_steps=round(0.1 * STEPS),
        final_loss=done.final_loss,
        untrained_loss=done.untrained_loss,
    )
    return spec | {
        "final_loss": done.final_loss if done.final_loss == done.final_loss else None,
        "untrained_loss": done.untrained_loss,
        "crashed": bool(judged.crash),
        "crash": judged.crash,
        "seconds": done.seconds,
        "train_losses": thinned(done.losses, 20),
        "ends": {name.partition(".")[2]: points[-1][1] for name, points in done.lrs.items()},
        "lrs": done.lrs if arm.key == FULL else {},
    }


def _plain(arm: Arm, spec: Record, rates: Mapping[str, Sequence[Sequence[float]]]) -> Training:
    """Train without replicas: with a rate for each group that ends where the arm says, or that was found."""
    job, start = job_of(spec), time.monotonic()
    model = job.build_model()
    untrained, final, losses = evaluate(job.task, model)["loss"], float("nan"), list[float]()
    optimizer = job.optimizer(model, LR)
    found = {name.partition(".")[2]: {int(step): lr for step, lr in points} for name, points in rates.items()}

    def on_loss(loss: float) -> None:
        step = len(losses)
        losses.append(loss)
        for group in optimizer.param_groups:
            name = group["name"]
            if found and step >= controller_start(STEPS):
                group["lr"] = found[name].get(step + 1, group["lr"])  # it changes where a round begins
            elif found or arm.ends is not None:
                end = (arm.ends or {}).get(name, RESIDUAL)
                group["lr"] = LR * decay_shape(step, steps=STEPS, end=end)
            else:
                group["lr"] = LR * one_cycle(step, STEPS)

    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(derived_seed(job.seed, "training"))
        try:
            descend(job, model, optimizer, job.batches(), STEPS, on_loss=on_loss)
            final = evaluate(job.task, model)["loss"]
        except Diverged:
            pass
    return Training(final, untrained, losses, {}, time.monotonic() - start)


def table(records: Sequence[Record]) -> str:
    """A line for each arm: crashes, Fisher's test against the first two, losses, and where rates end."""
    by_arm = {arm.key: [record for record in records if record["row"] == arm.key] for arm in ARMS}
    heads = ["arm", "seeds", "crashed", "p against full", "p against equal", "held-out loss", "highest"]
    lines = [table_line([*heads, "biases, norms", "others"]), table_line(["---", *["---:"] * 8])]
    counts = {key: (sum(map(is_crash, runs)), len(runs)) for key, runs in by_arm.items()}
    for arm in ARMS:
        if not (runs := by_arm[arm.key]):
            continue
        tests = [fisher(*counts[arm.key], *counts[key]) for key in (FULL, "equal")]
        peaks = [max(loss or 0.0 for _, loss in run["train_losses"]) for run in runs]
        ends = [run["ends"] for run in runs]
        cells = [arm.name, str(len(runs)), str(counts[arm.key][0]), *(f"{p:.2g}" for p in tests)]
        cells += [mean_text([run["final_loss"] for run in runs]), f"{min(peaks):.3g} to {max(peaks):.3g}"]
        lines.append(table_line([*cells, _ends(ends, True), _ends(ends, False)]))
    return "\n".join(lines)


def is_crash(record: Record) -> bool:
    """Tell whether a run crashed by the rule of the ablation, which needs the best plain run of charlm."""
    lost = is_lost(record["final_loss"], untrained_loss=record["untrained_loss"], best_loss=BEST_LOSS)
    return record["crashed"] or lost


def _ends(ends: Sequence[Mapping[str, float]], is_biases: bool) -> str:
    """Where the learning rate ends, in percent of the peak: mean over seeds and groups."""
    found = [
        lr
        for of_run in ends
        for name, lr in of_run.items()
        if len(of_run) > 1 and (name == "no_decay") == is_biases
    ]
    return f"{100 * statistics.fmean(found):.1f} %" if found else "-"


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--table", action="store_true", help="print what is there, without running")
    told = parser.parse_args()
    if not told.table:
        _run_all(told.folder)
    print(table(Ledger(told.folder, _FILE, _KEY, "crashed").records))


def _run_all(folder: Path) -> None:
    decisive = [arm for arm in ARMS if arm.is_decisive]
    main_arms = [arm for arm in ARMS if not arm.is_extra]
    for arms, seeds in ((main_arms, SEEDS), (main_arms, SEEDS), (ARMS, SEEDS), (decisive, MORE_SEEDS)):
        run(folder, arms, seeds)  # twice, as an arm follows what a later seed has found


if __name__ == "__main__":
    main()

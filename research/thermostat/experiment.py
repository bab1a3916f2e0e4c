"""Run the study: the law on the zoo and on random problems, then the thermostat against plain runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch.optim import SGD

from hdet.checks import require_choice
from hdet.method.fan_out import derived_seed
from hdet.method.thermostat import FOUND, GUESS, LAST, Round, Thermostat, ThermostatState, steered
from research.compare.ledger import Ledger, Record, finishing
from research.peers.base import Job
from research.thermostat.problems import GRID, NUM_RANDOM, RandomProblem
from research.thermostat.run import train_run
from research.zoo import experiment as zoo
from research.zoo.catalogue import names, problem_of
from research.zoo.problem import Problem
from research.zoo.summary import NEAR, Baseline, baseline_of

__all__ = ["FACTORS", "ZOO", "best_of", "open_ledger", "run_study"]

_KEY = ("problem", "method", "start", "lr", "seed")
_MOST = 8
"""How many neighbours a sweep of a random problem goes from its middle, at most."""
_ZOO_RUNS = Path(__file__).parents[1] / "zoo" / "records"
FACTORS = (0.2, 0.45, 1.0, 2.2, 5.0)
"""Learning rates of the law, over the best of the zoo's sweep."""
STARTS = (0.2, 1.0, 5.0)
"""Where runs with the thermostat begin, alone."""
SETTINGS = {
    "thermostat": Thermostat(priors=GUESS),
    "found, thermostat": Thermostat(priors=FOUND),
}
ZOO = (
    "movies_factorization",
    "flights_tables",
    "digits_denoiser",
    "mnist_conv_batch_norm",
    "patches_autoencoder",
    "weather_tcn",
    "language_conv",
    "glyphs_conv_sgd",
    "chars_gpt",
    "chorales_lstm",
    "kjv_gru",
    "glosses_mixer",
    "burgers_pinn",
    "glyphs_vit",
    "manuals_gpt",
    "finetune_lora",
    "finetune_all",
    "spelling_transformer",
)
"""The zoo's problems that train in less than 12 seconds, the fast ones first."""


def open_ledger(folder: str | Path) -> Ledger:
    """The runs of a folder."""
    return Ledger(Path(folder), "thermostat.jsonl", _KEY, result="rounds")


@lru_cache(maxsize=1)
def _zoo_records() -> list[Record]:
    return zoo.open_ledger(_ZOO_RUNS).records


@lru_cache(maxsize=32)
def best_of(name: str) -> Baseline:
    """The strict baseline of a problem of the zoo."""
    found = baseline_of(_zoo_records(), name, (0, 1))
    assert found is not None, name
    return found


def _spec(problem: str, method: str, start: float | None, lr: float, seed: int) -> Record:
    return dict(zip(_KEY, (problem, method, start, float(f"{lr:.4g}"), seed), strict=True))


def run_study(
    folder: str | Path,
    *,
    problems: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    stages: Sequence[str] = ("law",),
    num_jobs: int = 1,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Run what the folder does not have yet; whether all is there in the end.

    Args:
        folder: of ``thermostat.jsonl``.
        problems: these only.
        seeds: which.
        stages: ``law`` measures the zoo, ``random`` the random problems.
        num_jobs: runs at a time; 0 for one per core.
        on_done: called with the number of runs done, and that of all as far as it is known.
        should_stop: asked now and then.
    """
    every = [*names(), *(f"random {n}" for n in range(NUM_RANDOM))]
    wanted = [require_choice("problems", name, tuple(every)) for name in problems] or list(ZOO)
    ledger = open_ledger(folder)
    with finishing(ledger, train, num_jobs, on_done, should_stop) as finish:
        while "random" in stages and (
            specs := [s for n in range(NUM_RANDOM) for s in _next_random(n, ledger)]
        ):
            if not finish(specs):
                return False
        for stage in stages:
            if stage != "random" and not finish([s for n in wanted for s in _specs(stage, n, seeds, ledger)]):
                return False
        return True


def _specs(stage: str, name: str, seeds: Sequence[int], ledger: Ledger) -> list[Record]:
    """The runs of a stage on a problem."""
    if stage == "after":
        found = [
            (r["start"], r["found_lr"], r["seed"])
            for r in _zoo_records()
            if (r["problem"], r["method"]) == (name, "hdet_find")
            and r["start"] in NEAR
            and r["seed"] in seeds
        ]
        return [
            _spec(name, m, start, lr, s) for start, lr, s in found for m in ("found", "found, thermostat")
        ]
    if name.startswith("random "):
        losses = {
            r["start"]: loss_of(r) for r in ledger.records if (r["problem"], r["method"]) == (name, "plain")
        }
        best, middle = min(losses, key=losses.__getitem__), RandomProblem(int(name.split()[1])).learning_rate
        starts = [best * GRID**p for p in (-2, 0, 2)]
        return [_spec(name, "thermostat", float(f"{f:.6g}"), f * middle, s) for f in starts for s in seeds]
    if stage == "law":  # other seeds are there for the comparison alone
        return [
            _spec(name, "plain", f, f * best_of(name).lr, s)
            for s in seeds
            for f in (STARTS if s else FACTORS)
        ]
    return [_spec(name, "thermostat", f, f * best_of(name).lr, s) for s in seeds for f in STARTS]


def _next_random(number: int, ledger: Ledger) -> list[Record]:
    """What to run next on a random problem: seven learning rates, more while the best is at an end."""
    name, middle = f"random {number}", RandomProblem(number).learning_rate
    runs = {r["start"]: loss_of(r) for r in ledger.records if (r["problem"], r["method"]) == (name, "plain")}
    places = {round(math.log(start) / math.log(GRID)): loss for start, loss in runs.items()}
    wanted = [place for place in range(-3, 4) if place not in places]
    if not wanted:
        best = min(places, key=places.__getitem__)
        wanted = [p for p in (best - 1, best + 1) if p not in places and abs(p) <= _MOST]
    return [_spec(name, "plain", float(f"{GRID**p:.6g}"), middle * GRID**p, 0) for p in wanted]


def loss_of(record: Record) -> float:
    """Held-out loss; infinite where there is none."""
    return math.inf if record["final_loss"] is None else record["final_loss"]


def train(spec: Record) -> Record:
    """Run one, and add its results."""
    torch.set_flush_denormal(True)
    try:
        return _train(spec)
    finally:
        torch.set_flush_denormal(False)


@lru_cache(maxsize=4)
def _problem(name: str) -> Problem:
    return RandomProblem(int(name.split()[1])) if name.startswith("random ") else problem_of(name)


def _train(spec: Record) -> Record:
    problem = _problem(spec["problem"])
    optimizer = problem.build_optimizer(problem.parameter_groups(problem.build_model(0)), 1.0)
    job = Job(
        task=problem,
        start_lr=spec["lr"],
        steps=problem.num_steps,
        seed=spec["seed"],
        num_replicas=problem.num_replicas,
        optimizer_kind="sgd" if isinstance(optimizer, SGD) else "adamw",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(spec["seed"], "training"))
        began = time.process_time()
        if spec["method"] == "plain":
            metrics, seen = train_run(job, is_law=True)
        elif spec["method"] == "found":
            metrics, seen = train_run(job, num_scored=0)
        else:
            settings = SETTINGS[spec["method"]]
            metrics, seen = train_run(job, steer=partial(_factor, settings), num_scored=LAST)
        seconds = time.process_time() - began
    loss = metrics.get("loss", math.inf)
    columns = [r._asdict() | (seen.more[k] if seen.more else {}) for k, r in enumerate(seen.rounds)]
    return spec | {
        "final_loss": loss if math.isfinite(loss) else None,
        "steps": job.steps,
        "factor": round(seen.factor, 4),
        "rounds": {
            name: [_shown(c[name], name) for c in columns]
            for name in _COLUMNS
            if columns and name in columns[0]
        },
        "seconds": round(seconds, 2),
    }


def _factor(settings: Thermostat, rounds: Sequence[Round]) -> float:
    state = ThermostatState()
    for seen in rounds:
        state = steered(state, seen, settings)
    return math.exp(state.log_factor)


_LOSSES = ("end", "mean", "train", "wide", "train_end", "train_mean")
_COLUMNS = ("lr", *_LOSSES, "move", "scatter", "cosine", "norm")


def _shown(value: float, name: str) -> float | None:
    digits = 7 if name in _LOSSES else 4
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None

"""Three problems of the zoo in JAX: what hdet.jax finds, against a sweep and against torch.

    python -m research.jax_zoo --out research/jax_zoo/records/jax_zoo.json
    python -m research.jax_zoo --table research/jax_zoo/records/jax_zoo.json

Data, initial weights, optimizers, starts and steps are those of the zoo. The search is part of the steps. The
sweep has nine learning rates, four to a factor of ten, with the schedule and the tail of hdet.jax.auto_lr and
all of the steps. Runs that are in the file already are not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
import optax  # pyright: ignore[reportMissingImports]
import torch

import hdet.jax
from research.jax_zoo.models import MODELS
from research.peers.base import Job
from research.zoo.catalogue import problem_of
from research.zoo.experiment import open_ledger, sweep_losses
from research.zoo.problem import Problem
from research.zoo.sweep import PER_DECADE, lr_at

STARTS = (0.1, 1.0, 10.0)
LATTICE = range(-8, 9, 2)
"""Points of the sweep around the zoo's best: four to a factor of ten, over two decades."""
TORCH_RECORDS = Path("research/zoo/records")


def as_numpy(batch: Any) -> Any:
    """A batch of the zoo for JAX."""
    return jax.tree.map(lambda tensor: tensor.numpy(), batch)


class Case:
    """One problem with one seed: data, initial weights and optimizer of the zoo."""

    def __init__(self, name: str, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self._model, self.problem = MODELS[name], problem_of(name)
        assert isinstance(self.problem, Problem)
        self.num_steps = self.problem.num_steps
        self.job = Job(
            task=self.problem, start_lr=1.0, steps=self.num_steps, seed=seed,
            num_replicas=self.problem.num_replicas, optimizer_kind="adamw",
        )  # fmt: skip
        model = self.problem.build_model(seed).to(dtype)
        buffers = {name: tensor.numpy() for name, tensor in model.named_buffers()}
        self.params = {name: jnp.array(tensor.detach().numpy()) for name, tensor in model.named_parameters()}
        self.loss_fn = lambda params, batch: self._model.loss_fn(params, buffers, batch)

    def tx(self, lr: float) -> optax.GradientTransformation:
        """The optimizer."""

        def make(learning_rate: float) -> optax.GradientTransformation:
            return self._model.optimizer(learning_rate)

        return optax.inject_hyperparams(make)(learning_rate=lr)

    def batches(self) -> Iterator[Any]:
        """One for each step, those of all replicas joined."""
        return map(as_numpy, self.job.batches())

    def train(self, tx: Any, num_steps: int, peaks: list[float] | None = None) -> list[float]:
        """Held-out losses after training, one for each peak learning rate. All train at the same time."""
        data = jax.tree.map(lambda *leaves: jnp.array(np.stack(leaves)), *islice(self.batches(), num_steps))

        def step(carry: Any, batch: Any) -> tuple[Any, None]:
            params, state = carry
            loss, gradients = jax.value_and_grad(self.loss_fn)(params, batch)
            updates, state = tx.update(gradients, state, params, value=loss)
            return (optax.apply_updates(params, updates), state), None

        def run(peaks: jax.Array) -> Any:
            state = tx.init(self.params)
            state = state._replace(peaks=peaks)
            (params, state), _ = jax.lax.scan(step, (self.params, state), data)
            return hdet.jax.eval_params(state, params)

        every = tx.init(self.params).peaks[None] if peaks is None else jnp.array(peaks)[:, None]
        rows = jax.jit(jax.vmap(run))(every)
        score = jax.jit(jax.vmap(self.loss_fn, (0, None)))
        losses = [np.asarray(score(rows, as_numpy(batch))) for batch in self.problem.evaluation_batches()]
        return [x if math.isfinite(x) else math.inf for x in np.mean(losses, axis=0, dtype=float).tolist()]


def grid_of(name: str) -> list[float]:
    """The learning rates of the sweep."""
    middle = round(math.log10(MODELS[name].best_lr) * PER_DECADE)
    return [lr_at(middle + k) for k in LATTICE]


def measure(out: Path, num_seeds: int, names: list[str]) -> None:
    """Make all runs that the file does not have."""
    record: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"runs": []}
    record["command"] = f"python -m research.jax_zoo --seeds {num_seeds} --out {out}"
    record["versions"] = {"jax": jax.__version__, "optax": optax.__version__}
    done = {tuple(run["key"]) for run in record["runs"]}

    def keep(*runs: dict[str, Any]) -> None:
        record["runs"] += runs
        out.write_text(json.dumps(record, indent=1) + "\n")
        print(*runs, sep="\n", flush=True)

    for name in names:
        for seed in range(num_seeds):
            case = Case(name, seed)
            starts = [float(f"{MODELS[name].best_lr * start:.6g}") for start in STARTS]
            for start in starts:
                if (name, "hdet", start, seed) in done:
                    continue
                begin = time.monotonic()
                tx = case.tx(start)
                found = hdet.jax.find_lr(
                    case.loss_fn, case.params, tx, case.batches(), total_steps=case.num_steps
                )
                seconds = time.monotonic() - begin
                steps = case.num_steps - found.num_steps  # the search is part of the budget
                (loss,) = case.train(hdet.jax.auto_lr(tx, total_steps=steps, found=found), steps)
                keep(
                    {
                        "key": [name, "hdet", start, seed],
                        "loss": round(loss, 6),
                        "found": found.lr[0],
                        "likely": [found.low[0], found.high[0]],
                        "search_steps": found.num_steps,
                        "search_seconds": round(seconds, 1),
                        "reason": found.reason,
                    }
                )
            grid = grid_of(name)
            if any((name, "sweep", lr, seed) not in done for lr in grid):
                losses = case.train(
                    hdet.jax.auto_lr(case.tx(1.0), total_steps=case.num_steps), case.num_steps, grid
                )
                keep(
                    *(
                        {"key": [name, "sweep", lr, seed], "loss": round(loss, 6)}
                        for lr, loss in zip(grid, losses, strict=True)
                    )
                )


def table(path: Path) -> str:
    """Losses over the best of the sweep, and what torch found from the same starts in the zoo."""
    runs = json.loads(path.read_text())["runs"]
    torch_records = open_ledger(TORCH_RECORDS).records
    lines = [
        "| problem | start | found, two seeds | with torch | loss / best of the sweep | loss with torch |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in dict.fromkeys(run["key"][0] for run in runs):
        here = [run for run in runs if run["key"][0] == name]
        seeds = sorted({run["key"][3] for run in here})
        sweep: dict[float, list[float]] = {}
        for run in here:
            if run["key"][1] == "sweep":
                sweep.setdefault(run["key"][2], []).append(run["loss"])
        if not sweep:  # not measured yet
            continue
        means = {lr: statistics.fmean(losses) for lr, losses in sweep.items()}
        best = min(means, key=means.__getitem__)
        torch_best = min(sweep_losses(torch_records, name, seeds).values())
        lines.append(f"| {name} | best of the sweep | {best:.2g} | | 1.000 | |")
        starts = sorted({run["key"][2] for run in here if run["key"][1] == "hdet"})
        for start in starts:
            ours = [run for run in here if run["key"][1:3] == ["hdet", start]]
            theirs = [
                r for r in torch_records
                if (r["problem"], r["method"], r["lr"]) == (name, "hdet_find", start) and r["seed"] in seeds
            ]  # fmt: skip
            rates = ", ".join(f"{run['found']:.2g}" for run in ours)
            torch_rates = ", ".join(f"{run['found_lr']:.2g}" for run in theirs)
            ratio = statistics.fmean(run["loss"] for run in ours) / means[best]
            torch_ratio = statistics.fmean(run["final_loss"] for run in theirs) / torch_best
            off = f"{start:.2g} (x{start / MODELS[name].best_lr:.2g})"
            lines.append(f"| | {off} | {rates} | {torch_rates} | {ratio:.3f} | {torch_ratio:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/jax_zoo.json"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--problem", choices=list(MODELS), action="append", help="this one only")
    parser.add_argument("--table", type=Path, help="print the table of a record, and do nothing else")
    args = parser.parse_args()
    if args.table is None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        measure(args.out, args.seeds, args.problem or list(MODELS))
    print(table(args.table or args.out))


if __name__ == "__main__":
    main()

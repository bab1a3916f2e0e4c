"""The same run of the zoo in torch and in JAX, in float32 and in float64: do they end at the same loss?

    python -m research.jax_zoo.against_torch --out research/jax_zoo/records/against_torch.json

Both train from the same weights, on the same batches, at the same peak learning rate. In float64 both should
end at the same loss. How far they end apart in float32 is what rounding does.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import islice
from pathlib import Path

import jax  # pyright: ignore[reportMissingImports]
import torch

import hdet
import hdet.jax
from hdet.lab.train.runner import evaluate
from research.jax_zoo.__main__ import Case
from research.jax_zoo.models import MODELS

__all__ = ["losses"]


def losses(name: str, seed: int, dtype: torch.dtype) -> tuple[float, float]:
    """Held-out losses after a whole run, in torch and in JAX.

    Args:
        name: of the problem. It trains at the best learning rate of the zoo's sweep.
        seed: of weights and batches.
        dtype: of the weights.
    """
    with jax.enable_x64(dtype == torch.float64):
        case = Case(name, seed, dtype)
        lr = MODELS[name].best_lr
        model = case.problem.build_model(seed).to(dtype)
        optimizer = case.problem.build_optimizer(case.problem.parameter_groups(model), lr)
        auto = hdet.AutoLR(optimizer, total_steps=case.num_steps, model=model)
        for batch in islice(case.job.batches(), case.num_steps):
            loss = case.problem.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            auto.step(loss)
        in_torch = evaluate(case.problem, model)["loss"]
        tx = hdet.jax.auto_lr(case.tx(lr), total_steps=case.num_steps)
        (in_jax,) = case.train(tx, case.num_steps)
    return in_torch, in_jax


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problem", choices=list(MODELS), default="flights_tables")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/jax_against_torch.json"))
    args = parser.parse_args()
    runs = []
    for dtype in (torch.float32, torch.float64):
        for seed in range(args.seeds):
            in_torch, in_jax = losses(args.problem, seed, dtype)
            runs.append({"dtype": str(dtype), "seed": seed, "torch": in_torch, "jax": in_jax})
            print(runs[-1], flush=True)
        apart = [abs(run["jax"] / run["torch"] - 1) for run in runs if run["dtype"] == str(dtype)]
        print(f"{dtype}: {statistics.fmean(apart):.1e} apart in the mean", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    command = f"python -m research.jax_zoo.against_torch --problem {args.problem} --seeds {args.seeds}"
    args.out.write_text(json.dumps({"command": command, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()

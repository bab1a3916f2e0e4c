"""Run our submission and AlgoPerf's own baselines on its mnist workload, and print the table.

    python -m research.algoperf --clone CLONE --data FOLDER --out research/algoperf/records/mnist.json
    python -m research.algoperf --table research/algoperf/records/mnist.json

CLONE is a clone of AlgoPerf that runs under this Python, and FOLDER what ``python -m research.algoperf.data``
has made. Runs that are in the file already are not made again.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

TARGET, MOST_STEPS = 0.97, 7813
"""The workload's target of validation accuracy, and its step hint."""
RATES = {
    "nadamw": [1.75e-4, 1.75e-3, 1.75e-2, 1.75e-1],
    "adamw": [1e-4, 1e-3, 1e-2, 1e-1],
    "nesterov": [1e-2, 1e-1, 1.0],
}
"""Of AlgoPerf's baselines. NAdamW's own is 1.75e-3."""
ROOT = Path(__file__).parents[2]


def run(clone: Path, data: Path, method: str, lr: float | None, seed: int) -> dict[str, Any]:
    """One run of AlgoPerf's runner; steps, seconds, accuracies and losses of its evaluations."""
    env = os.environ | {"PYTHONPATH": f"{clone}{os.pathsep}{ROOT}", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if lr is not None:
        env |= {"ALGOPERF_BASELINE": method, "ALGOPERF_LEARNING_RATE": str(lr)}
    submission = "submission" if lr is None else "baseline"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "research.algoperf.launch", "--framework=pytorch", "--workload=mnist",
            "--tuning_ruleset=self", f"--submission_path=research/algoperf/{submission}.py",
            f"--data_dir={data}", f"--experiment_dir={folder}", "--experiment_name=run", f"--rng_seed={seed}",
            f"--max_global_steps={MOST_STEPS}", "--torch_compile=False", "--save_checkpoints=False",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-3000:]}")
        results = Path(folder, "run", "mnist_pytorch", "trial_1")
        evaluations = _rows(results / "eval_measurements.csv")
        notes = _rows(results / "measurements.csv")
    result: dict[str, Any] = {"key": [method, lr, seed]}
    for row in notes:
        if row.get("found_lr"):
            result |= {"found": float(row["found_lr"]), "search_steps": round(float(row["search_steps"]))}
    columns = ("accumulated_submission_time", "validation/accuracy", "validation/loss", "test/accuracy")
    result["evaluations"] = [
        [int(row["global_step"]), *(round(float(row[column]), 4) for column in columns)]
        for row in evaluations
    ]
    return result


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def steps_to_target(result: dict[str, Any]) -> float:
    """Optimizer steps until an evaluation is above the target, with those of the search; else infinity.

    >>> steps_to_target({"search_steps": 100, "evaluations": [[1, 5.0, 0.1], [900, 9.0, 0.975]]})
    1000.0
    """
    steps = (row[0] for row in result["evaluations"] if row[2] > TARGET)
    return float(next(steps, math.inf)) + result.get("search_steps", 0)


def table(path: Path) -> str:
    """One row for each method and learning rate."""
    results = json.loads(path.read_text())["runs"]
    groups: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(tuple(result["key"][:2]), []).append(result)
    lines = [
        "| | learning rate | seeds | reached | steps to 97 % | best accuracy |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method, lr in sorted(groups, key=lambda key: (["hdet", *RATES].index(key[0]), key[1] or 0)):
        here = groups[method, lr]
        rates = f"{lr:.3g}" if lr else "found: " + ", ".join(f"{result['found']:.2g}" for result in here)
        steps = list(map(steps_to_target, here))
        shown = ", ".join(f"{count:.0f}" if math.isfinite(count) else "never" for count in steps)
        best = median(max(row[2] for row in result["evaluations"]) for result in here)
        num_reached = sum(map(math.isfinite, steps))
        lines.append(f"| {method} | {rates} | {len(here)} | {num_reached} | {shown} | {best:.4f} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clone", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/algoperf/mnist.json"))
    parser.add_argument("--methods", nargs="+", default=["hdet", *RATES], choices=["hdet", *RATES])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="from 1 on")
    parser.add_argument("--table", type=Path, help="print the table of a record, and do nothing else")
    args = parser.parse_args()
    if args.table is None:
        if args.clone is None or args.data is None:
            parser.error("--clone and --data are needed to make runs")
        record = json.loads(args.out.read_text()) if args.out.exists() else {"runs": []}
        done = {tuple(result["key"]) for result in record["runs"]}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        for seed in args.seeds:
            for method in args.methods:
                for lr in RATES.get(method, [None]):
                    if (method, lr, seed) in done:
                        continue
                    result = run(args.clone.resolve(), args.data.resolve(), method, lr, seed)
                    record["runs"].append(result)
                    args.out.write_text(json.dumps(record) + "\n")
                    print(result["key"], steps_to_target(result), result["evaluations"][-1], flush=True)
    print(table(args.table or args.out))


if __name__ == "__main__":
    main()

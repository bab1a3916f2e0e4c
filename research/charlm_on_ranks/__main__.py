"""Compare plain training with the parts of the paper's method, on four ranks.

    python -m research.charlm_on_ranks            # run what is missing, then print the table
    python -m research.charlm_on_ranks --table    # only the table, from the saved results

Each cell is mean and standard deviation over three seeds. Results are kept in records/charlm.json, so that
the table can be rebuilt without training. ``python -m research compare`` has many more methods.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parent / "records" / "charlm.json"
METHODS = {
    "plain DDP, OneCycleLR": ["--spread", "0", "--controller", "none"],
    "spread 1/9, averaging": ["--controller", "none"],
    "and the log controller": ["--controller", "log"],
    "and the paper's controller": ["--controller", "paper"],
}
STARTS = {"3e-4": 3e-4, "3e-3": 3e-3, "3e-2": 3e-2}
SEEDS = (0, 1, 2)


def run(arguments: list[str]) -> float:
    """Bits per character of one run, held out."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).with_name("torchrun")),
            *["--standalone", "--nproc-per-node", "4", str(Path(__file__).with_name("training.py"))],
            *["--out", f"{folder}/run", *arguments],
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        return json.loads(Path(folder, "run", "result.json").read_text())["bits_per_character"]


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="print the table from saved results only")
    args = parser.parse_args()
    results: dict[str, float] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not args.table:
        for seed in SEEDS:
            for start, lr in STARTS.items():
                for method, flags in METHODS.items():
                    key = f"{method} | {start} | {seed}"
                    if key in results:
                        continue
                    results[key] = run([*flags, "--max-lr", str(lr), "--seed", str(seed)])
                    print(f"{key}: {results[key]:.4f}", flush=True)
                    RESULTS.parent.mkdir(parents=True, exist_ok=True)
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print("| bits per character, held out | " + " | ".join(f"from {start}" for start in STARTS) + " |")
    print("| --- |" + " --- |" * len(STARTS))
    for method in METHODS:
        cells = []
        for start in STARTS:
            values = [results[key] for seed in SEEDS if (key := f"{method} | {start} | {seed}") in results]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}" if values else "-")
        print(f"| {method} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

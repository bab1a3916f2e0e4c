"""Measure the speed promises: `make bench`. Exits with 1 if a row is over its bound.

Every row is a ratio against its counterpart in the same process and the same run, repeats interleaved,
medians taken: absolute times of a shared machine mean little. Writes benchmarks/results.json and the
table of docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.rows import ROWS, Row

ROOT = Path(__file__).parent.parent


def main() -> int:
    """Run all rows, or those whose name contains an argument; these then take the place of earlier ones."""
    wanted = sys.argv[1:]
    rows: list[Row] = []
    for name, measure in ROWS.items():
        if wanted and not any(word in name for word in wanted):
            continue
        start = time.monotonic()
        print(f"{name} ...", flush=True)
        for row in measure():
            rows.append(row)
            mark = "      " if row.bound is None else "ok    " if row.holds else "OVER  "
            bound = "" if row.bound is None else f", at most {row.bound:g}"
            print(f"  {mark}{row.what}: {row.ratio:.4g}{bound}   ({row.detail})")
        print(f"  {time.monotonic() - start:.0f} s", flush=True)
    over = [row for row in rows if not row.holds]
    _write(rows, keeps_others=bool(wanted))
    for row in over:
        print(f"OVER ITS BOUND: {row.what}: {row.ratio:.4g}, at most {row.bound:g}", file=sys.stderr)
    return 1 if over else 0


def _write(rows: list[Row], *, keeps_others: bool) -> None:
    file = ROOT / "benchmarks" / "results.json"
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip(),
    }
    measured = {row.what: row.as_json() | {"commit": machine["commit"]} for row in rows}
    if keeps_others:
        earlier = json.loads(file.read_text())
        known = {row["what"]: {"commit": earlier["machine"]["commit"]} | row for row in earlier["rows"]}
        measured, machine = known | measured, earlier["machine"]
    results = {"command": "make bench", "machine": machine, "rows": list(measured.values())}
    file.write_text(json.dumps(results, indent=1) + "\n")
    lines = ["| what | ratio | at most | spread of repeats | measured |", "| --- | --- | --- | --- | --- |"]
    for row in measured.values():
        bound = "" if row["bound"] is None else f"{row['bound']:g}" + ("" if row["holds"] else " **over**")
        spread = f"{row['low']:.3g} to {row['high']:.3g}"
        lines.append(f"| {row['what']} | {row['ratio']:.3g} | {bound} | {spread} | {row['detail']} |")
    page = ROOT / "docs" / "benchmarks.md"
    head, mark, _ = page.read_text().partition("<!-- table: make bench -->\n")
    about = f"Python {machine['python']}, torch {machine['torch']}, {machine['cores']} cores."
    page.write_text(head + mark + "\n" + "\n".join(lines) + "\n\n" + about + "\n")


if __name__ == "__main__":
    sys.exit(main())

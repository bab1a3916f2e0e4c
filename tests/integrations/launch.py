"""Start a script of the tests or of the examples, on one process or on several."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_script(path: str | Path, *arguments: object, num_ranks: int = 1, cwd: Path | None = None) -> str:
    """What the script has printed; an error with the end of its messages if it failed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    launcher.append(str(ROOT / "tests" / "helpers" / "script.py"))
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *(launcher if num_ranks > 1 else []), str(ROOT / path), *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def run_ranks(path: str | Path, folder: Path, *arguments: object, num_ranks: int = 2) -> list[Any]:
    """What each rank has written to ``rankN.json`` in the folder, which the script is given first."""
    run_script(path, folder, *arguments, num_ranks=num_ranks)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def leave() -> None:
    """End the process group. A thread of it that lives when the interpreter ends may abort the process."""
    import torch.distributed as dist

    gc.collect()  # a DDP module must be gone before its group
    dist.barrier()
    dist.destroy_process_group()

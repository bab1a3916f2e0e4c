"""What a command imports."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SLOW_PACKAGES = {"torch", "numpy", "plotly", "sklearn", "matplotlib"}


def imported_by(*command: str) -> set[str]:
    """Names of all modules that ``python -m COMMAND`` imports, in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}

"""Run a script on a rank as python would, and leave at once: python script.py SCRIPT ARGUMENTS.

While the interpreter ends, a thread of torch can abort a process that had gloo ranks, also without hdet (see
docs/when-things-go-wrong.md). An error of the script itself ends it as always.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

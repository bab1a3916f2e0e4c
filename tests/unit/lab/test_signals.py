"""A signal that ends at once ends with the exit code that was asked for."""

import subprocess
import sys

SCRIPT = """
import os, signal, sys
from hdet.lab.pool import stop_on_signal
try:
    with stop_on_signal(ends_at_once=lambda: True):
        exec("import os, signal; os.kill(os.getpid(), signal.SIGINT); [0 for _ in range(9)]")
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_an_interrupt_inside_exec_keeps_the_exit_code(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "-m", "script"], cwd=tmp_path, check=False)
    assert done.returncode == 130

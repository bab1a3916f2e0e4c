"""The examples run as their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(*arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("launcher", [[], [*TORCHRUN, "2"]], ids=["alone", "two ranks"])
def test_a_loop_that_finds_its_learning_rate_and_resumes(tmp_path, launcher):
    example = [*launcher, str(ROOT / "examples/auto_lr.py"), "--steps", "200"]
    first = run(*example, cwd=tmp_path)
    assert "found: learning rate" in first and "held-out loss" in first
    again = run(*example, "--resume", cwd=tmp_path)
    assert first.splitlines()[-1] == again.splitlines()[-1]


def test_a_sharded_model(tmp_path):
    shown = run(*TORCHRUN, "4", str(ROOT / "examples/sharded.py"), cwd=tmp_path)
    assert "step 200 of 200, 2 replicas" in shown

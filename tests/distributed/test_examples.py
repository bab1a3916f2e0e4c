"""The examples run as their first lines say, and stay short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name: str, *arguments: str, ranks: int = 1, cwd: Path) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), str(ROOT / "examples" / name), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(example):
    assert len(example.read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    ("name", "ranks", "replicas"),
    [
        ("one_device.py", 1, "1 replica"),
        ("data_parallel.py", 2, "2 replicas"),
        ("sharded.py", 4, "2 replicas"),
    ],
)
def test_an_example_finds_a_learning_rate_and_trains(tmp_path, name, ranks, replicas):
    shown = run(name, "60", ranks=ranks, cwd=tmp_path)
    assert "found: learning rate" in shown and f"step 60 of 60, {replicas}" in shown
    assert float(shown.split("held-out loss ")[1]) < 4.5  # 5.5 is that of a model that knows nothing


def test_fine_tuning(tmp_path):
    shown = run("fine_tuning.py", "60", cwd=tmp_path)
    assert "asked for was 5e-05" in shown and float(shown.split("other windows ")[1]) < 2.5


def test_a_run_that_is_started_again_ends_the_same(tmp_path):
    whole = run("checkpoints.py", "200", cwd=tmp_path)
    (tmp_path / "runs/checkpoints/step-000200.pt").unlink()
    again = run("checkpoints.py", "200", cwd=tmp_path)
    assert "step 100:" in whole and "step 100:" not in again
    assert whole.splitlines()[-1] == again.splitlines()[-1]


def test_the_papers_scheduler(tmp_path):
    shown = run("paper_method.py", "100", ranks=2, cwd=tmp_path)
    assert "rank 0" in shown and "rank 1" in shown and "held-out loss" in shown


def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples/find_lr.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    script = "\n".join(code).replace("%matplotlib inline", "").replace("STEPS = 1000", "STEPS = 60")
    exec(compile(script, "find_lr.ipynb", "exec"), {})

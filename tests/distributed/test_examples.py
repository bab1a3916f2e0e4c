"""The examples run as their first lines say, and stay short."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name: str, *arguments: str, ranks: int = 1, cwd: Path) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launcher.append(str(ROOT / "tests" / "helpers" / "script.py"))
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


@pytest.mark.parametrize(("name", "ranks"), [("weight_decay.py", 1), ("weight_decay_on_ranks.py", 2)])
def test_held_out_data_moves_the_weight_decay(tmp_path, name, ranks):
    shown = run(name, "300", ranks=ranks, cwd=tmp_path)
    found = re.search(r"weight_decay: asked for 0.01, now ([\d.]+)", shown)
    assert found is not None and float(found[1]) > 0.05
    assert float(shown.split("test loss ")[1]) < 4.0


@pytest.mark.parametrize(
    "name", ["data_parallel.py", "paper_method.py", "sharded.py", "weight_decay_on_ranks.py"]
)
def test_an_example_for_several_ranks_says_how_it_is_started(name):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "torchrun --standalone --nproc-per-node" in done.stderr
    assert f"examples/{name}" in done.stderr and "Traceback" not in done.stderr


def test_fine_tuning(tmp_path):
    shown = run("fine_tuning.py", "60", cwd=tmp_path)
    assert "your guess was 5e-05" in shown and float(shown.split("other windows ")[1]) < 2.5


def test_a_run_that_is_started_again_ends_the_same(tmp_path):
    whole = run("checkpoints.py", "200", cwd=tmp_path)
    (tmp_path / "runs/checkpoints/step-000200.pt").unlink()
    again = run("checkpoints.py", "200", cwd=tmp_path)
    assert "step 100:" in whole and "step 100:" not in again
    assert whole.splitlines()[-1] == again.splitlines()[-1]


@pytest.mark.parametrize(("name", "ranks"), [("paper_method.py", 2), ("paper_method_one_device.py", 1)])
def test_the_papers_whole_method(tmp_path, name, ranks):
    shown = run(name, "100", ranks=ranks, cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", shown)]
    assert len(losses) == 1 and losses[0] < 4.5
    lrs = [float(lr) for lr in re.findall(r"(?:embedding|transformer|no_decay) ([\de.-]+)(?=,|\n|$)", shown)]
    assert len(set(lrs)) > 3 and all(1e-4 < lr < 3e-3 for lr in lrs)  # every group goes its own way


def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples/find_lr.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    script = "\n".join(code).replace("%matplotlib inline", "").replace("STEPS = 1000", "STEPS = 60")
    exec(compile(script, "find_lr.ipynb", "exec"), {})


SHARDING = """\
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
"""


def test_the_call_of_the_readme_with_fully_shard(tmp_path):
    """What a sharded model adds to it: a mesh, fully_shard, and the axis of the replicas."""
    snippet = re.search(
        r"<!-- run this -->\n```python\n((?:(?!```).)*?hdet\.tune.*?)```",
        (ROOT / "README.md").read_text(),
        re.DOTALL,
    )
    assert snippet is not None
    imports, *lines = snippet[1].replace("1000", "100").replace("range(10)", "range(1)").splitlines()
    model = next(line for line in lines if line.startswith("model = "))
    lines.insert(lines.index(model) + 1, "fully_shard(model, mesh=mesh)")
    script = "\n".join([imports, SHARDING, *lines, "dist.destroy_process_group()", ""])
    script, num_calls = re.subn(
        r"(hdet\.tune\(.*)\)$", r'\1, replicas=mesh["replicate"])', script, flags=re.MULTILINE
    )
    assert num_calls == 1
    (tmp_path / "snippet.py").write_text(script)
    shown = run(str(tmp_path / "snippet.py"), ranks=4, cwd=tmp_path)
    assert shown.count("step 100 of 100, 2 replicas") == 4
    assert len(set(re.findall(r"learning rate [\d.e-]+", shown))) == 1  # lines of ranks may run together

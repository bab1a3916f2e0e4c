"""The comparison of presets runs, goes on where it stopped, and tells the best learning rate of each."""

from __future__ import annotations

import argparse
import json
import math

import pytest

from research import local_training


def test_runs_are_kept_and_told(tmp_path, monkeypatch):
    monkeypatch.setattr(local_training, "FACTORS", (1.0,))
    chosen = {
        name: local_training.METHODS[name] for name in ("shared gradients", "diloco", "grawa", "swap", "pbt")
    }
    monkeypatch.setattr(local_training, "METHODS", chosen)
    out = tmp_path / "record.json"
    options = argparse.Namespace(task="quadratic", lr=0.05, steps=60, seeds=1, out=out)
    local_training.run(options)
    runs = json.loads(out.read_text())["runs"]
    assert [run["method"] for run in runs] == list(chosen)
    assert all(math.isfinite(run["loss"]) for run in runs)
    monkeypatch.setattr(local_training, "train", lambda *_: pytest.fail("it was made already"))
    local_training.run(options)
    lines = local_training.table(out).splitlines()
    assert len(lines) == 2 + len(chosen) and "| diloco | 0.05 |" in lines[3]

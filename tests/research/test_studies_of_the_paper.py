"""Two studies beside the ablation: why the full method recovers, and the paper's own settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hdet.lab.ablation import FULL
from hdet.lab.tasks.task import load_task
from research.ablation import paper_settings, recovery

TINY = {"num_users": 8, "num_items": 16, "batch_size": 2, "length": 4, "width": 4, "num_layers": 1}


def test_arms_differ_by_what_they_say(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery, "STEPS", 50)
    monkeypatch.setattr(recovery, "LR", 0.01)
    feed = {"task": "feed", "task_options": TINY, "lr": 0.01, "steps": 50, "replicas": 4}
    monkeypatch.setattr(recovery, "BASE", recovery.BASE | feed)
    keys = ("full", "equal", "shuffled", "kept", "follow", "follow_other", "low_biases", "plain")
    arms = [arm for arm in recovery.ARMS if arm.key in keys]
    for _ in range(2):  # one arm waits for a later seed
        recovery.run(tmp_path, arms, (0, 1))
    file = tmp_path / "recovery.jsonl"
    written = file.read_bytes()
    recovery.run(tmp_path, arms, (0, 1))
    assert file.read_bytes() == written

    runs = {(r["row"], r["seed"]): r for r in map(json.loads, written.decode().splitlines())}
    assert set(runs) == {(key, seed) for key in keys for seed in (0, 1)}
    assert len({runs[key, 0]["final_loss"] for key in keys}) == len(keys)
    assert list(runs["equal", 0]["ends"].values()) == [pytest.approx(0.0022)] * 4
    full, kept = runs["full", 0], runs["kept", 0]
    assert len(set(full["ends"].values())) == 4 and full["ends"] != kept["ends"]
    assert [points[-1][0] for points in full["lrs"].values()] == [50] * 4
    lines = recovery.table(list(runs.values())).splitlines()
    assert lines[2].startswith("| full method | 2 | 0 | 1 | 1 | ")
    assert lines[3].endswith(" | 0.2 % | 0.2 % |")


@pytest.mark.parametrize(
    ("study", "page"),
    [(recovery, "research/ablation/results.md"), (paper_settings, "docs/reproduction.md")],
)
def test_pages_show_the_table_of_the_record(study, page, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    folder = study.__name__.rpartition(".")[2].replace("_", "-")
    monkeypatch.setattr("sys.argv", ["study", f"research/ablation/records/{folder}", "--table"])
    study.main()
    printed, shown = capsys.readouterr().out.splitlines(), Path(page).read_text()
    assert not [line for line in printed if line.startswith("|") and line not in shown]
    if study is recovery:  # the page has the arms of five seeds and more
        assert sum(line in Path("docs/reproduction.md").read_text() for line in printed) == 15


def test_the_settings_are_the_papers():
    runs = {spec["row"]: spec for spec in paper_settings.specs([0], every=1000)}
    settings = runs[FULL]["settings"]
    assert runs[FULL]["steps"] == 100_000 and runs[FULL]["lr"] == pytest.approx(9 * runs["plain"]["lr"])
    assert (settings["sync_every"], settings["controller_start"], settings["temperature"]) == (
        1000,
        33_333,
        0.1,
    )
    assert (settings["anneal"], settings["warmup"], settings["floor"]) == ("cosine", 0.3, 0.22)
    assert runs["warm_init_checkpoint"]["settings"]["sync_every"] == 100_000
    assert runs["hdet_.002"]["settings"]["temperature"] == 0.002
    assert [spec["seed"] for spec in paper_settings.specs([0, 1])].count(1) == len(runs)


def test_the_stream_goes_on_where_it_was_and_has_bursts():
    task = load_task(
        "research.ablation.paper_settings:Stream", TINY | {"steps_per_year": 200, "burst_every": 10}
    )
    stream = task.train_batches(seed=0, replica=1)
    batches = [next(stream) for _ in range(131)]
    again = next(task.train_batches(seed=0, replica=1, start=129))
    assert all(torch.equal(batches[129][name], values) for name, values in again.items())
    spoilt = [step for step, batch in enumerate(batches) if batch["actions"].all()]
    assert spoilt == [110, 120, 130]


def test_the_table_of_long_runs():
    specs = paper_settings.specs([0, 1])
    done = {"crashed": False, "train_losses": [[1, 0.5], [2, 0.4]], "metrics": {"auc": 0.8, "ne": 0.75}}
    records = [spec | done | {"final_loss": 0.3 + 0.1 * (spec["row"] == "grid")} for spec in specs]
    lines = paper_settings.table(records).splitlines()
    assert lines[0] == "### small model, 20000 steps, T = 200, 2 seeds"
    numbers = "0.4000 ± 0.0000 | 0.4500 ± 0.0000 | 0.8000 ± 0.0000 | 0.7500 ± 0.0000 | 0/2 |"
    assert f"| Baseline-High | 0.027 | {numbers}" in lines
    better = "- HDET (full), checkpoint is better than Baseline-High: lower by 0.1000 ± 0.0000 (t, 2 seeds)."
    assert better in lines

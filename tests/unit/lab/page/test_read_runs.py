import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hdet.lab.page import Evaluation, read_run, sentence
from hdet.records import Records
from tests.helpers.runs import real_records, write_run


def test_a_whole_run_is_read_without_notes(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert run.name == "feed, log controller" and run.notes == []
    assert len(run.records) == 60 and run.num_replicas == 4
    assert [e.step for e in run.evaluations] == list(range(0, 301, 20))
    assert run.status == "finished" and run.last_step == 300
    assert run.final_loss == run.evaluations[-1].loss
    assert set(run.final_metrics) == {"mean error", "explained variance"}


def test_the_record_of_the_search_stands_apart(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", controllers=("guard",)))
    assert run.notes == [] and run.search is not None and run.search.asked == 0.01
    assert [record.step for record in run.records] == list(range(5, 301, 5))


@pytest.mark.parametrize(("num_averaged_steps", "status"), [(0, "recorded"), (22, "finished")])
def test_records_of_a_script_need_nothing_beside_them(
    tmp_path: Path, num_averaged_steps: int, status: str
) -> None:
    records = list(real_records("guard")[0])
    records[-1] = replace(records[-1], num_averaged_steps=num_averaged_steps)
    sink = Records(tmp_path / "records.jsonl")
    for record in records:
        sink.write(record)
    run = read_run(tmp_path)
    assert run.notes == [] and run.status == status and run.last_step == 300
    assert "unfinished" not in sentence(run) and "4 replicas trained for 300 steps." in sentence(run)


@pytest.mark.parametrize("status", [None, "failed"])
def test_a_run_before_its_first_sync_misses_nothing(tmp_path: Path, status: str | None) -> None:
    path = write_run(tmp_path / "run", is_finished=False)
    (path / "records.jsonl").unlink()
    if status is not None:
        (path / "result.json").write_text(json.dumps({"status": status}))
    assert read_run(path).notes == []


def test_an_unfinished_run_is_read(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", is_finished=False))
    assert run.notes == [] and run.result == {} and run.status == "unfinished"
    assert run.final_loss == run.evaluations[-1].loss


@pytest.mark.parametrize("missing", ["config.json", "environment.json", "records.jsonl", "evaluations.jsonl"])
def test_a_missing_file_becomes_a_note(tmp_path: Path, missing: str) -> None:
    path = write_run(tmp_path / "run")
    (path / missing).unlink()
    run = read_run(path)
    assert run.notes == [f"{missing} is missing"]
    if missing == "config.json":
        assert run.name == "run"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"name": "x', "config.json, line 1: not JSON"),
        (b"", "config.json, line 1: not JSON"),
        (b"[1]", "config.json cannot be read (it must hold an object, got a list)"),
        (b"\xff", "config.json cannot be read"),
        (b"[" * 100_000, "config.json cannot be read"),
        (
            b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}",
            "config.json cannot be read (nested too deeply)",
        ),
        (b'{"a": "' + b"x" * 2**18 + b'"}', "config.json cannot be read (it must have at most 256 KiB)"),
    ],
)
def test_a_broken_object_becomes_a_note(tmp_path: Path, content: bytes, reason: str) -> None:
    path = write_run(tmp_path / "run")
    (path / "config.json").write_bytes(content)
    run = read_run(path)
    assert run.config == {} and len(run.records) == 60
    assert len(run.notes) == 1 and run.notes[0].startswith(reason)


@pytest.mark.parametrize("name", ["config.json", "records.jsonl", "result.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
def test_only_plain_files_of_a_sensible_size_are_read(tmp_path: Path, name: str, kind: str) -> None:
    path = write_run(tmp_path / "run")
    (path / name).unlink()
    if kind == "pipe":
        os.mkfifo(path / name)
    elif kind == "device":
        (path / name).symlink_to("/dev/zero")
    else:
        with (path / name).open("wb") as file:
            file.truncate(2**40)  # it takes no place
    run = read_run(path)
    assert run.notes == [f"{name} cannot be read (it must be a file of at most 256 MiB)"]


def test_broken_lines_become_notes_and_the_rest_is_read(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    for name in ("records.jsonl", "evaluations.jsonl"):
        lines = (path / name).read_text().splitlines()
        lines[3] = lines[3][:30]
        (path / name).write_text("\n".join(lines)[:-20])
    run = read_run(path)
    assert len(run.records) == 58 and len(run.evaluations) == 14
    assert [note.split(":")[0] for note in run.notes] == [
        "records.jsonl, line 4",
        "records.jsonl, line 60",
        "evaluations.jsonl, line 4",
        "evaluations.jsonl, line 16",
    ]


def test_many_broken_lines_are_summed_up(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "records.jsonl").write_text("x\n" * 500)
    run = read_run(path)
    assert len(run.notes) == 11 and run.notes[-1] == "records.jsonl: 490 more lines cannot be read"


def test_odd_evaluations(tmp_path: Path) -> None:
    lines = [
        {"step": 10, "loss": 1.0, "metrics": {"auc": 0.5, "odd": "high", "none": None}, "seconds": "soon"},
        {"step": 20, "loss": None},
        {"step": "30", "loss": 1.0},
        {"step": 40, "loss": "NaN"},
        {"loss": 1.0},
        [1],
        {"step": 50, "loss": float("nan"), "metrics": None},
    ]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(tmp_path)
    assert run.evaluations == [
        Evaluation(10, 1.0, metrics={"auc": 0.5}), Evaluation(20, None), Evaluation(50, None),
    ]  # fmt: skip
    assert sum("evaluations.jsonl, line" in note for note in run.notes) == 4
    assert run.final_loss == 1.0


def test_a_resumed_run_replaces_evaluations(tmp_path: Path) -> None:
    lines = [{"step": s, "loss": x} for s, x in ((10, 1.0), (20, 2.0), (30, 3.0), (20, 2.5))]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(e.step, e.loss) for e in read_run(tmp_path).evaluations] == [(10, 1.0), (20, 2.5)]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a directory"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"holds no run: expected at least one of config\.json"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="is not a directory"):
        read_run(tmp_path / "notes.txt")


def test_a_directory_in_place_of_a_file_becomes_a_note(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").mkdir()
    (tmp_path / "config.json").mkdir()
    notes = read_run(tmp_path).notes
    assert any(note.startswith("records.jsonl cannot be read") for note in notes)
    assert any(note.startswith("config.json cannot be read") for note in notes)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything; run them as another user")
def test_a_file_that_may_not_be_read_becomes_a_note(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "records.jsonl").chmod(0)
    assert read_run(path).notes == ["records.jsonl cannot be read (Permission denied)"]

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hdet import JsonlSink, Records, RoundRecord, read_records
from hdet.telemetry import ScoutDecision, ScoutRecord

DECISION = ScoutDecision(chosen=2.0, low=1.5, high=2.5, transfer=0.5, factor=1.0, reason="why")
FAN = ScoutRecord(stage="narrow", peak_lr=0.1, factors=[1.0, 2.0], scores=[0.5, None], decision=DECISION)


def record(step: int, **more: object) -> RoundRecord:
    return RoundRecord(round=step // 10 - 1, step=step, num_replicas=2, losses=[0.5, None], **more)  # pyright: ignore[reportArgumentType]


def test_records_survive_the_file(tmp_path: Path) -> None:
    records = Records(tmp_path / "new" / "records.jsonl")
    written = [record(10, excluded={1: "parameters are not finite"}), record(20, base={"lr": 0.1 + 0.2})]
    for each in written:
        records.write(each)
    assert list(records) == written
    assert read_records(tmp_path / "new" / "records.jsonl") == written


def test_an_unfinished_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    JsonlSink(path).write(record(10))
    with path.open("a") as file:
        file.write('{"round": 1, "st')
    assert [r.step for r in read_records(path)] == [10]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(record(10).to_json() + "\nnonsense\n" + record(20).to_json() + "\n")
    with pytest.raises(ValueError, match="line 2: not a round record"):
        read_records(path)


def test_a_resumed_run_replaces_the_rounds_that_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    for step, loss in ((10, 1.0), (20, 2.0), (30, 3.0), (20, 2.5)):
        each = record(step)
        each.losses = [loss, loss]
        JsonlSink(path).write(each)
    assert [(r.step, r.losses[0]) for r in read_records(path)] == [(10, 1.0), (20, 2.5)]


def test_fields_of_a_later_version_are_ignored() -> None:
    text = record(10).to_json()[:-1] + ',"from_the_future":1}'
    assert RoundRecord.from_json(text) == record(10)


def test_a_resumed_run_does_not_run_on_with_an_unfinished_line(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    JsonlSink(path).write(record(10))
    with path.open("a") as file:
        file.write('{"round": 1, "st')
    resumed = JsonlSink(path)
    resumed.write(record(20))
    resumed.write(record(30))
    assert [r.step for r in read_records(path)] == [10, 20, 30]


def test_records_in_memory_go_back_too() -> None:
    records = Records()
    for step in (10, 20, 30, 20):
        records.write(record(step))
    assert [r.step for r in records] == [10, 20]


@pytest.mark.parametrize("fan", [FAN, replace(FAN, decision=None), None])
def test_what_the_scout_saw_survives_the_line(fan: ScoutRecord | None) -> None:
    assert RoundRecord.from_json(record(10, scout=fan).to_json()) == record(10, scout=fan)


def earlier(scout: dict) -> str:
    """A line as earlier versions wrote it: one flat object for what the scout saw and decided."""
    return json.dumps(json.loads(record(10).to_json()) | {"scout": scout})


def test_lines_of_earlier_versions_still_load() -> None:
    seen = {"stage": "narrow", "peak_lr": 0.1, "factors": [1.0, 2.0], "scores": [0.5, None]}
    decided = {
        "chosen_factor": 2.0, "low": 1.5, "high": 2.5, "transfer": 0.5, "factor": 1.0, "reason": "why",
    }  # fmt: skip
    assert RoundRecord.from_json(earlier({})).scout is None
    assert RoundRecord.from_json(earlier(seen)).scout == replace(FAN, decision=None)
    assert RoundRecord.from_json(earlier(seen | decided)).scout == FAN


def test_fields_that_a_later_version_adds_to_the_scout_are_ignored() -> None:
    data = json.loads(record(10, scout=FAN).to_json())
    data["scout"]["new"] = data["scout"]["decision"]["new"] = 1
    assert RoundRecord.from_json(json.dumps(data)).scout == FAN

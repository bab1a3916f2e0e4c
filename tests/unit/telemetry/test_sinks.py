import json
from pathlib import Path

import pytest

from hdet import JsonlSink, Records, RoundRecord, read_records
from hdet.telemetry import SearchRecord

SEARCH = SearchRecord(
    asked=0.1,
    found=0.2,
    low=0.1,
    high=0.4,
    reason="why",
    num_steps=80,
    ramp=[[0.1, 2.0]],
    trials=[[0.1, 1.0], [0.2, None]],
)


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


@pytest.mark.parametrize("search", [SEARCH, None])
def test_what_a_search_saw_survives_the_line(search: SearchRecord | None) -> None:
    assert RoundRecord.from_json(record(10, search=search).to_json()) == record(10, search=search)


def test_fields_that_another_version_knows_are_ignored() -> None:
    data = json.loads(record(10, search=SEARCH).to_json())
    data["scout"] = data["search"]["new"] = {"stage": "wide"}
    assert RoundRecord.from_json(json.dumps(data)) == record(10, search=SEARCH)

import json
import os
from pathlib import Path

import pytest

from hdet import HdetWarning, JsonlSink, Records, RoundRecord, read_records
from hdet.records import SearchRecord

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


def test_records_that_cannot_be_written_wait_until_they_can(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "records.jsonl"
    sink = Records(path)
    sink.write(record(10))
    path.rename(tmp_path / "kept")
    path.parent.rmdir()
    path.parent.write_text("in the way")
    with pytest.warns(HdetWarning, match=r"cannot be written to .*The run goes on.*make room") as told:
        sink.write(record(20))
        sink.write(record(30))
    assert len(told) == 1
    path.parent.unlink()
    path.parent.mkdir()
    (tmp_path / "kept").rename(path)
    sink.write(record(40))
    assert [r.step for r in read_records(path)] == [10, 20, 30, 40]


def test_a_full_disk_leaves_no_half_line_and_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = JsonlSink(tmp_path / "records.jsonl")
    sink.write(record(10))

    def half(descriptor: int) -> None:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - 20)
        raise OSError("No space left on device")

    with monkeypatch.context() as full, pytest.warns(HdetWarning, match="No space left on device"):
        full.setattr("os.fsync", half)
        sink.write(record(20))
    sink.write(record(30))
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 3
    assert [r.step for r in read_records(tmp_path / "records.jsonl")] == [10, 20, 30]


@pytest.mark.parametrize("sink", [JsonlSink, Records])
def test_a_place_that_cannot_be_written_is_refused_at_once(sink: type, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"path must be a file that can be written, .*file is not a folder"):
        sink(tmp_path / "file" / "deeper" / "records.jsonl")
    with pytest.raises(OSError, match=r"path must be .*it is a folder"):
        sink(tmp_path)
    sink(tmp_path / "new" / "records.jsonl")
    assert not (tmp_path / "new").exists()  # nothing is created before there is something to write


def test_a_folder_without_permission_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # the superuser may write anywhere
    with pytest.raises(OSError, match=f"{tmp_path} cannot be written to"):
        JsonlSink(tmp_path / "records.jsonl")


@pytest.mark.parametrize(
    "content", [b"hello", b"hello\n", b"\x89PNG\r\n\x1a\n\x00", b"[1, 2]", b"{}\n", b"7"]
)
def test_a_file_of_something_else_is_no_empty_run(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"line 1: not a round record .* got .*pass a file that hdet.Records"
    ):
        read_records(path)


@pytest.mark.parametrize("content", ["", '{"ro', record(10).to_json()[:30]])
def test_a_run_that_has_no_record_yet_is_empty(content: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(content)
    assert read_records(path) == []


def first_round(step: int) -> RoundRecord:
    return record(step, num_steps=step)


def search() -> RoundRecord:
    return RoundRecord(round=0, step=0, num_replicas=2, search=SEARCH)


@pytest.mark.parametrize(
    ("second", "steps"),
    [
        ([first_round(5), record(10, num_steps=5)], [5, 10]),  # the script was started again
        ([search(), first_round(20)], [0, 20]),  # the same, with a search
        ([record(30, num_steps=10)], [0, 10, 20, 30]),  # resumed after step 20
        ([record(20, num_steps=10)], [0, 10, 20]),  # resumed after step 10
    ],
)
def test_a_new_run_begins_a_new_file_and_a_resumed_one_goes_on(
    second: list[RoundRecord], steps: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"
    for run in ([search(), first_round(10), record(20, num_steps=10)], second):
        sink = JsonlSink(path)
        for each in run:
            sink.write(each)
    assert [r.step for r in read_records(path)] == steps
    is_new = second[0].step == second[0].num_steps
    assert (tmp_path / "records.jsonl.old").exists() == is_new


def test_a_run_that_stopped_before_its_first_round_keeps_what_its_search_found(tmp_path: Path) -> None:
    JsonlSink(tmp_path / "records.jsonl").write(search())
    JsonlSink(tmp_path / "records.jsonl").write(first_round(10))
    assert read_records(tmp_path / "records.jsonl") == [search(), first_round(10)]


def test_records_in_memory_begin_again_too() -> None:
    records = Records()
    for each in (first_round(10), record(20, num_steps=10), first_round(15)):
        records.write(each)
    assert list(records) == [first_round(15)]

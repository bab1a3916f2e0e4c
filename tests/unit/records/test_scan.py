import json
from pathlib import Path

import pytest

from hdet.records import RoundRecord, read_records, scan_records
from hdet.round_record import ComparingRecord

SEARCH = {
    "asked": 0.1, "found": 0.2, "low": 0.1, "high": 0.4, "reason": "why", "num_steps": 80,
    "ramp": [[0.1, 2.0]], "trials": [[0.1, 1.0], [0.2, None]],
}  # fmt: skip


def line(step: int, /, **more: object) -> str:
    return json.dumps({"round": 0, "step": step, "num_replicas": 2, "losses": [0.5, None]} | more)


def scan(tmp_path: Path, *lines: str, end: str = "\n") -> tuple[list[int], list[str]]:
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(lines) + end)
    records, notes = scan_records(path)
    return [record.step for record in records], notes


def test_a_clean_file_has_no_notes(tmp_path: Path) -> None:
    assert scan(tmp_path, line(10), line(20)) == ([10, 20], [])
    assert [r.step for r in read_records(tmp_path / "records.jsonl")] == [10, 20]


def test_what_a_search_saw_is_fine(tmp_path: Path) -> None:
    assert scan(tmp_path, line(0, search=SEARCH), line(30, search=None)) == ([0, 30], [])


def test_a_cut_last_line_is_named(tmp_path: Path) -> None:
    steps, notes = scan(tmp_path, line(10), '{"round": 1, "st', end="")
    assert steps == [10]
    assert notes == ["records.jsonl, line 2: not a round record (the line is cut off)"]


def test_broken_lines_are_skipped_and_blank_ones_ignored(tmp_path: Path) -> None:
    steps, notes = scan(tmp_path, line(10), "nonsense", "", line(20))
    assert steps == [10, 20]
    assert notes == ["records.jsonl, line 2: not a round record (not JSON: Expecting value at column 1)"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"step": "10"}, "step must be a whole number"),
        ({"step": True}, "step must be a whole number"),
        ({"step": 10**30}, "step must be a whole number"),
        ({"step": None}, "step must be a whole number"),
        ({"losses": ["NaN", 0.5]}, "losses must be a list of numbers or null"),
        ({"losses": None}, "losses must be a list of numbers or null"),
        ({"losses": [10**400]}, "losses must be a list of numbers or null"),
        ({"controllers": {"comparing": {"weights": [None]}}}, "comparing.weights must be a list of numbers"),
        ({"controllers": []}, "controllers must be an object"),
        ({"controllers": {"guard": None}}, "not an object with the fields of a record"),
        ({"base": {"lr": None}}, "base must be numbers by name"),
        ({"base": [0.1]}, "base must be numbers by name"),
        ({"values": {"lr": 0.1}}, "values must be lists of numbers by name"),
        ({"ends_round": 1}, "ends_round must be true or false"),
        (
            {"controllers": {"comparing": {"temperature": "hot"}}},
            "comparing.temperature must be a number or null",
        ),
        ({"excluded": {"1": 5}}, "excluded must be reasons"),
        ({"excluded": {"one": "why"}}, "invalid literal"),
        ({"controllers": {"guard": {"num_brakes": -1}}}, "guard.num_brakes must be a whole number"),
        ({"num_averaged_steps": None}, "num_averaged_steps must be a whole number"),
        ({"bytes_sent": 0.5}, "bytes_sent must be a whole number"),
        ({"merge_weights": {"0": 1.0}}, "merge_weights must be a list of numbers"),
        ({"search": 5}, "search must be an object or null"),
        ({"search": [SEARCH]}, "search must be an object or null"),
        ({"search": {"asked": 0.1}}, "SearchRecord missing 7 required"),
        ({"search": SEARCH | {"reason": None}}, "search.reason must be text"),
        ({"search": SEARCH | {"low": "high"}}, "search.low must be a number"),
        ({"search": SEARCH | {"ramp": [[0.1, None]]}}, "search.ramp must be pairs of numbers"),
        ({"search": SEARCH | {"trials": [[0.1]]}}, "search.trials must be pairs"),
        ({"search": SEARCH | {"num_steps": -1}}, "search.num_steps must be a whole number"),
        ({"excluded": None}, "not an object with the fields of a record"),
    ],
)
def test_odd_values_are_skipped_with_the_reason(tmp_path: Path, more: dict, reason: str) -> None:
    steps, notes = scan(tmp_path, line(10, **more), line(20))
    assert steps == [20]
    assert len(notes) == 1 and "line 1" in notes[0] and reason in notes[0]


@pytest.mark.parametrize("text", ["[]", "5", "null", '"text"', "{}", "[" * 100_000, '{"step": 1}'])
def test_other_json_never_raises(tmp_path: Path, text: str) -> None:
    steps, notes = scan(tmp_path, text, line(20))
    assert steps == [20] and len(notes) == 1


def test_bytes_that_are_no_text_never_raise(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"\xff\xfe\x00\n" + line(20).encode() + b"\r\n")
    records, notes = scan_records(path)
    assert [r.step for r in records] == [20]
    assert notes == ["records.jsonl, line 1: not a round record (not UTF-8)"]


def test_numbers_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    compared = ComparingRecord(signal={"lr": float("nan")})
    record = RoundRecord(
        round=0, step=10, num_replicas=1, controllers={"comparing": compared}, base={"lr": float("inf")}
    )
    path.write_text(record.to_json() + "\n")
    records, notes = scan_records(path)
    assert len(records) == 1 and not notes


def test_the_later_record_of_a_step_wins(tmp_path: Path) -> None:
    steps, _ = scan(tmp_path, line(10), line(20), line(30), line(20, losses=[9.0]))
    assert steps == [10, 20]
    assert scan_records(tmp_path / "records.jsonl")[0][1].losses == [9.0]

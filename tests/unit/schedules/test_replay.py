from pathlib import Path

import pytest

import hdet
from tests.helpers.runs import real_records, write_run


def test_the_schedule_of_a_run_that_was_scouted_begins_after_the_scout(tmp_path: Path) -> None:
    records, _ = real_records("anchored")
    schedule = hdet.export_schedule(records)
    rounds = [record for record in records if record.scout is None]
    assert len(schedule["lr.head"]) == 300 - 48 + 1
    assert schedule["lr.head"][0] == rounds[0].base_trace["lr.head"][0]
    assert schedule["lr.head"][-1] == rounds[-1].base["lr.head"]
    written = hdet.read_records(write_run(tmp_path / "run", has_finder=True) / "records.jsonl")
    assert hdet.export_schedule(written) == schedule


def test_a_run_within_the_scout_has_no_schedule() -> None:
    records, _ = real_records("anchored")
    with pytest.raises(ValueError, match="at least one record"):
        hdet.export_schedule(records[:4])

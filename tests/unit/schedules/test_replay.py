import pytest

import hdet
from hdet.telemetry import SearchRecord
from tests.helpers.runs import real_records


def test_what_was_found_before_the_run_is_no_part_of_its_schedule() -> None:
    search = SearchRecord(asked=0.1, found=0.2, low=0.1, high=0.4, reason="", num_steps=9, ramp=[], trials=[])
    first = hdet.RoundRecord(round=0, step=0, num_replicas=4, ends_round=False, search=search)
    records, _ = real_records("log")
    assert hdet.export_schedule([first, *records]) == hdet.export_schedule(records)
    with pytest.raises(ValueError, match="at least one record"):
        hdet.export_schedule([first])

"""The lines of a run's parts say what its records say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hdet.lab.page.method_parts import method_parts
from hdet.lab.page.read_runs import Run
from hdet.records import RoundRecord, SearchRecord


def record(number: int, **fields: Any) -> RoundRecord:
    return RoundRecord(round=number, step=10 * (number + 1), num_replicas=2, converged=True, **fields)


def lines_of(**fields: Any) -> list[tuple[str, str]]:
    return list(method_parts(Run(path=Path(), name="run", **fields)))


def test_a_run_whose_replicas_differed():
    spread = {
        "multipliers": {"lr": [0.9, 1.1], "weight_decay": [0.5, 1.5]},
        "values": {"lr": [0.009, 0.011], "weight_decay": [0.05, 0.15]},
        "probes": [1.0, 0.8],
        "milliseconds": {"probe": 3.0, "converge": 2.0},
    }
    records = [record(n, base={"lr": 0.01, "weight_decay": 0.1 + n / 10}, **spread) for n in range(10)]
    search = SearchRecord(
        asked=1e-3,
        found=0.01,
        low=0.005,
        high=0.02,
        reason="trials",
        num_steps=46,
        ramp=[],
        trials=[[0.01, 1.0]] * 8,
    )
    lines = lines_of(
        records=records, search=search, result={"seconds": 1.0}, config={"controllers": ("guard",)}
    )
    assert lines == [
        ("search", "8 trials, 46 steps: found 0.01 from 1e-3"),
        ("fan-out", "2 replicas, lr x0.9 to x1.1, weight_decay x0.5 to x1.5, 10 rounds"),
        ("converge", "10 times, 5 % of the time in syncs"),
        ("replicas said", "Higher lr did better (in 10 of 10 rounds)."),
        ("replicas said", "Higher weight_decay did better (in 10 of 10 rounds)."),
        ("guard", "had nothing to do"),
        ("explored", "weight_decay began at 0.1 and ended at 1"),
    ]


def test_a_run_of_equal_replicas_that_went_back():
    records = [record(n, multipliers={"lr": [1.0, 1.0]}, num_brakes=n) for n in range(3)]
    records[-1].num_averaged_steps = 75
    assert lines_of(records=records, config={"controllers": ("guard",)}) == [
        ("fan-out", "none: 2 replicas, all alike"),
        ("guard", "went back 2 times"),
        ("tail", "the final weights are the mean over the last 75 steps"),
    ]


def test_a_thermostat_says_how_far_it_moved():
    records = [record(n, multipliers={"lr": [0.9, 1.1]}, thermostat_factors=[1 + n / 2]) for n in range(3)]
    lines = lines_of(records=records, config={"controllers": ("thermostat",)})
    assert lines[-2:] == [
        ("thermostat", "learning rate x2, by what averaging gained in 3 rounds"),
        ("guard", "had nothing to do"),
    ]


def test_a_controller_says_where_it_ended():
    spread = {"multipliers": {"lr": [0.9, 1.1]}, "losses": [1.0, None], "signal": {"lr": 0.1}}
    records = [record(n, base={"lr": 0.25}, **spread) for n in range(3)]
    assert ("auto-LR", "ended with lr at 0.25") in lines_of(records=records)


def looks(*slopes: float, error: float = 0.1) -> list[RoundRecord]:
    """One record before the looks, which has what the run began with, and one for each."""
    before = record(0, base={"weight_decay": 0.42}, base_trace={"weight_decay": [0.4]})
    told = {"slope_error": {"weight_decay": error}, "signal": {"weight_decay": 0.1}}
    return [before] + [
        record(n, slope={"weight_decay": slope}, base={"weight_decay": 0.5 + n / 10}, **told)
        for n, slope in enumerate(slopes, start=1)
    ]


@pytest.mark.parametrize(
    ("slopes", "verdict"),
    [
        ((9.0, -0.3, -0.2, -0.3, -0.1), "smaller weights would still help"),
        ((-9.0, 0.3, 0.2, 0.3, 0.1), "smaller weights would not help"),
        ((-9.0, 0.3, 0.2, -0.3, 0.1), "it is not clear whether smaller weights would help"),
    ],
)
def test_held_out_data_says_from_where_to_where_and_what_it_thinks_at_the_end(slopes, verdict):
    lines = lines_of(records=looks(*slopes), config={"controllers": ("guard",)})
    said = f"Held-out data moved the weight decay from 0.4 to 1 (5 looks). At the end {verdict}."
    assert lines[1:] == [("guard", "had nothing to do"), ("weight decay", said)]


def test_a_weight_decay_that_stayed_is_not_said_to_have_moved():
    told = {"slope": {"weight_decay": 0.3}, "slope_error": {"weight_decay": 0.1}}
    records = [record(n, base={"weight_decay": 0.03000001 - n * 1e-8}, **told) for n in range(3)]
    said = dict(lines_of(records=records))["weight decay"]
    assert said.startswith("Held-out data left the weight decay at 0.03 (3 looks). At the end ")


def test_looks_that_see_the_same_examples_are_not_surer_than_one():
    records = looks(*[-0.19] * 12)  # within two errors each
    assert "not clear" in dict(lines_of(records=records))["weight decay"]

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.records import SearchRecord
from tests.helpers.runs import real_records


def test_what_was_found_before_the_run_is_no_part_of_its_schedule() -> None:
    search = SearchRecord(asked=0.1, found=0.2, low=0.1, high=0.4, reason="", num_steps=9, ramp=[], trials=[])
    first = hdet.RoundRecord(round=0, step=0, num_replicas=4, ends_round=False, search=search)
    records, _ = real_records("log")
    assert hdet.export_schedule([first, *records]) == hdet.export_schedule(records)
    with pytest.raises(ValueError, match="at least one record"):
        hdet.export_schedule([first])


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


@pytest.mark.parametrize(
    ("schedule", "error", "words"),
    [
        ([0.1, 0.2], TypeError, r"schedule must be what hdet.export_schedule returned, .* got \[0.1, 0.2\]"),
        ({"lr": 0.1}, TypeError, r"schedule\['lr'\] must be a list of numbers, one for each step, got 0.1"),
        ({"lr": "0.1"}, TypeError, r"schedule\['lr'\] must be a list of numbers"),
        ({"lr": [0.1, "0.2"]}, TypeError, r"schedule\['lr'\]\[1\] must be a number of at least 0, got '0.2'"),
        (
            {"lr": [0.1, math.nan]},
            ValueError,
            r"schedule\['lr'\]\[1\] must be a number of at least 0, got nan",
        ),
        ({"lr": [-0.1]}, ValueError, r"schedule\['lr'\]\[0\] must be a number of at least 0, got -0.1"),
        (
            {"lr": [0.1], "temperature": [math.inf]},
            ValueError,
            r"schedule\['temperature'\]\[0\] must be a finite",
        ),
        ({"lr": []}, ValueError, "schedule must hold one learning rate"),
    ],
)
def test_a_schedule_that_is_none_is_named(schedule: Any, error: type[Exception], words: str) -> None:
    replayed = optimizer()
    with pytest.raises(error, match=words):
        hdet.ReplayLR(replayed, schedule)
    assert replayed.param_groups[0]["lr"] == 0.1


def test_what_is_replayed_is_a_list() -> None:
    schedule = {"lr": [0.1], "weight_decay": [0.0]}
    with pytest.raises(
        TypeError, match=r"explore must be a list of hyperparameters, got .* WeightDecay: write"
    ):
        hdet.ReplayLR(optimizer(), schedule, explore=hdet.WeightDecay())  # pyright: ignore[reportArgumentType]


def test_records_that_are_none_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "records.jsonl", str(tmp_path / "records.jsonl")):
        with pytest.raises(TypeError, match=r"records must be .*: pass hdet.read_records\('"):
            hdet.export_schedule(path)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"records must hold hdet.RoundRecord, got 3 of type int"):
        hdet.export_schedule([3])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="export on replica zero, which alone writes records"):
        hdet.export_schedule(hdet.Records())


def test_a_replay_closes_like_the_other_schedulers():
    replayed = optimizer()
    replayed.param_groups[0]["weight_decay"] = 0.5
    schedule = {"lr": [0.1, 0.2], "weight_decay": [0.3, 0.4]}
    with hdet.ReplayLR(replayed, schedule, explore=[hdet.WeightDecay(0.0)]) as replay:
        replayed.step()
        replay.step()
    assert replayed.param_groups[0]["weight_decay"] == 0.4  # a replay has no values of its own to take back
    replayed.load_state_dict(replayed.state_dict())
    assert replayed.param_groups[0]["weight_decay"] == 0.4
    replayed.param_groups[0]["weight_decay"] = 0.7
    replayed.load_state_dict(replayed.state_dict())
    assert replayed.param_groups[0]["weight_decay"] == 0.7, "after close() nothing is written any more"
    replay.close()

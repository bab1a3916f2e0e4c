"""``controllers=("held_out_weight_decay",)``: held-out data moves the weight decay of a run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet.lab.tasks.digits import Digits
from hdet.lab.train.config import RunConfig
from hdet.lab.train.folder import RunFolder
from hdet.lab.train.runner import run
from hdet.lab.train.trainers import Trainer
from hdet.round_record import WeightDecayRecord
from tests.helpers.replicas import run_replicas

NAME = "held_out_weight_decay"
BASE = RunConfig(task="digits", lr=0.01, steps=100, replicas=2, sync_every=5, find=False, controllers=(NAME,))
PLAIN = dataclasses.replace(BASE, controllers=("guard",))


class TwoGroups(Digits):
    """Biases say themselves that they do not decay."""

    def parameter_groups(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        plain = {"name": "biases", "params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}
        return [{"name": "matrices", "params": [p for p in parameters if p.ndim > 1]}, plain]


def decays_of(config: RunConfig) -> list[float]:
    trainer = Trainer(TwoGroups(), config, None, "cpu")
    return [group["weight_decay"] for group in trainer.engine.optimizer.param_groups]


def trained(path: Path, config: RunConfig = BASE, **more: Any) -> tuple[Any, list[hdet.RoundRecord]]:
    folder = RunFolder(path) if more.get("resume") else RunFolder.create(path, config, {})
    result = run(config, folder, task=TwoGroups(), **more)
    return result, hdet.read_records(folder.records)


def looks_of(records: list[hdet.RoundRecord]) -> list[tuple[int, WeightDecayRecord]]:
    return [
        (r.step, r.section(WeightDecayRecord)) for r in records if WeightDecayRecord.name in r.controllers
    ]


@pytest.mark.parametrize(
    ("changes", "decay"),
    [
        ({}, 0.03),
        ({"optimizer": "sgd"}, 5e-4),
        ({"weight_decay": 0.07}, 0.07),
        ({"controllers": ("guard",)}, 0.0),
    ],
    ids=str,
)
def test_it_starts_at_what_was_asked_for_or_at_what_is_usual(changes: dict[str, Any], decay: float) -> None:
    assert decays_of(dataclasses.replace(BASE, **changes)) == [pytest.approx(decay), 0.0]


def test_held_out_data_moves_it_and_no_replica_differs_in_it(tmp_path: Path) -> None:
    _, records = trained(tmp_path / "run", dataclasses.replace(BASE, spread=0.1, weight_decay=20.0))
    looks = looks_of(records)
    assert [step for step, _ in looks] == list(range(20, 91, 5))  # from 20 to 90 % of the run
    assert records[0].base["weight_decay"] == pytest.approx(20.0)
    moved = math.exp(math.fsum(look.move for _, look in looks))
    assert moved != 1 and records[-1].base["weight_decay"] == pytest.approx(20.0 * moved)
    assert {len(set(record.multipliers["weight_decay"])) for record in records} == {1}
    assert {len(set(record.multipliers["lr"])) for record in records} == {2}


def test_the_search_before_it_finds_the_same(tmp_path: Path) -> None:
    config = dataclasses.replace(BASE, find=True, weight_decay=0.03)
    _, without = trained(tmp_path / "a", dataclasses.replace(config, controllers=("guard",)))
    _, found = trained(tmp_path / "b", config)
    assert found[0].search is not None and found[0].search == without[0].search


@pytest.mark.parametrize("changes", [{}, {"find": True, "spread": 0.1}, {"weight_decay": 0.1}], ids=str)
def test_a_stopped_run_resumes_to_the_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    config, calls = dataclasses.replace(BASE, **changes), []
    whole, records = trained(tmp_path / "whole", config)
    stopped, _ = trained(
        tmp_path / "parts", config, should_stop=lambda: bool(calls.append(1)) or len(calls) > 5
    )
    assert stopped.status == "stopped" and 20 < stopped.steps < 90
    resumed, again = trained(tmp_path / "parts", config, resume=True)
    assert resumed.final_loss == whole.final_loss
    assert looks_of(again) == looks_of(records)
    assert [(r.step, r.base) for r in again] == [(r.step, r.base) for r in records]


def _rank(rank: int, path: Path) -> list[float | None]:
    config = dataclasses.replace(BASE, engine="torchrun")
    if rank == 0:
        RunFolder.create(path, config, {})
    torch.distributed.barrier()
    run(config, RunFolder(path), task=TwoGroups())
    return [look.slope for _, look in looks_of(hdet.read_records(path / "records.jsonl"))]


def test_ranks_see_what_virtual_replicas_see(tmp_path: Path) -> None:
    _, records = trained(tmp_path / "virtual")
    slopes = run_replicas(_rank, 2, tmp_path / "ranks")[0]
    assert len(slopes) == 15
    for there, (_, here) in zip(slopes, looks_of(records), strict=True):
        assert there == pytest.approx(here.slope, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "num_examples", "batch_size", "finds"),
    [
        ({}, 1599, 8, True),
        ({}, 1600, 8, False),  # each is seen once
        ({}, None, 8, False),
        ({}, 1600, 0, True),  # nobody knows how many a step takes
        ({"steps": 49}, 100, 8, False),
        ({"optimizer": "sgd"}, 100, 8, True),
        ({"optimizer": "adam"}, 100, 8, False),
        ({"probe": False}, 100, 8, False),
        ({"explore": {"weight_decay": 0.5}, "weight_decay": 0.1}, 100, 8, False),
        ({"explore": {"beta2": 0.5}}, 100, 8, True),
    ],
    ids=str,
)
def test_the_command_finds_it_where_the_data_repeat(
    changes: dict[str, Any], num_examples: int | None, batch_size: int, finds: bool
) -> None:
    config = dataclasses.replace(PLAIN, **changes).with_usual_controllers(num_examples, batch_size)
    assert config.controllers == (("guard", NAME) if finds else ("guard",))  # too short for a thermostat


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adam"}, "optimizer must be adamw or sgd for a HeldOutWeightDecay, got adam"),
        ({"probe": False}, "probe must be an hdet.Probe for .*, got None: leave --no-probe out"),
        ({"explore": {"weight_decay": 0.5}}, "explore must not hold an hdet.WeightDecay .*, got one: leave"),
        ({"controllers": (NAME, "thermostat", NAME)}, "controllers must name each kind once, got"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **changes)

"""``controllers=("thermostat",)``: what averaging gains moves the learning rate of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import hdet
from hdet.lab.train.config import RunConfig
from hdet.lab.train.folder import RunFolder
from hdet.lab.train.runner import run
from hdet.method.thermostat import FOUND, GUESS, LAST
from hdet.round_record import ThermostatRecord
from tests.helpers.replicas import run_replicas

BASE = RunConfig(
    task="digits", lr=3e-4, steps=200, replicas=2, spread=0.1, find=False, controllers=("thermostat",)
)


def trained(path: Path, config: RunConfig = BASE, **more: Any) -> tuple[Any, list[hdet.RoundRecord]]:
    folder = RunFolder(path) if more.get("resume") else RunFolder.create(path, config, {})
    return run(config, folder, **more), hdet.read_records(folder.records)


def factors_of(records: list[hdet.RoundRecord]) -> list[float]:
    sections = [r.section(ThermostatRecord) for r in records if ThermostatRecord.name in r.controllers]
    return [factor for section in sections for factor in section.factors]


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_a_low_learning_rate_rises_and_the_loss_is_lower(tmp_path: Path, spread: float):
    config = dataclasses.replace(BASE, spread=spread)
    result, records = trained(tmp_path / "steered", config)
    plain, _ = trained(tmp_path / "plain", dataclasses.replace(config, controllers=("guard",)))
    factors = factors_of(records)
    assert len(factors) == LAST and factors[-1] > 1.5
    assert result.found_lr == pytest.approx(3e-4 * factors[-1])
    assert result.final_loss < 0.95 * plain.final_loss


def test_it_goes_on_where_it_was_stopped_also_beside_the_weight_decay(tmp_path: Path):
    config = dataclasses.replace(BASE, controllers=("thermostat", "held_out_weight_decay"), find=True)
    whole, expected = trained(tmp_path / "whole", config)
    stop_at = iter([False] * 6 + [True] * 100)
    trained(tmp_path / "run", config, should_stop=lambda: next(stop_at))
    again, records = trained(tmp_path / "run", config, resume=True)
    assert again.final_loss == whole.final_loss and factors_of(records) == factors_of(expected)


def test_a_stop_within_a_round_where_replicas_differ_ends_in_the_same_digits(tmp_path: Path):
    config = dataclasses.replace(BASE, replicas=3, steps=480, sync_every=4)  # three syncs to a round
    whole, expected = trained(tmp_path / "whole", config)
    asked = [False] * 6
    stopped, _ = trained(tmp_path / "run", config, should_stop=lambda: not asked or asked.pop())
    again, records = trained(tmp_path / "run", config, resume=True)
    assert stopped.steps % 12 == 0
    assert again.final_loss == whole.final_loss and factors_of(records) == factors_of(expected)


def _trained_as_rank(rank: int, path: str) -> list[hdet.RoundRecord]:
    config = dataclasses.replace(BASE, engine="torchrun")
    folder = RunFolder(Path(path))
    run(config, folder)
    return hdet.read_records(folder.records) if rank == 0 else []


def test_ranks_move_as_virtual_replicas_do(tmp_path: Path):
    RunFolder.create(tmp_path / "ranks", BASE, {})
    by_ranks = factors_of(run_replicas(_trained_as_rank, 2, str(tmp_path / "ranks"))[0])
    assert by_ranks == pytest.approx(factors_of(trained(tmp_path / "rows")[1]), rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 199}, "steps must be at least 200 for a Thermostat, got 199: it steers while"),
        ({"probe": False}, "probe must be an hdet.Probe for a Thermostat, got None: leave --no-probe out"),
        ({"gradients": "local"}, "gradients must be 'shared' for a Thermostat, got 'local'"),
        ({"warmup": 0.1}, "warmup must be at least 0.35 for a Thermostat, got 0.1"),
        ({"sync_every": 6}, "sync_every must be at most 5 for a Thermostat where replicas differ, .*, got 6"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_named(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **changes)


def test_what_was_found_is_its_prior(tmp_path: Path):
    from hdet.lab.tasks.digits import Digits
    from hdet.lab.train.trainers import Trainer

    for find, priors in ((True, FOUND), (False, GUESS)):
        trainer = Trainer(Digits(), BASE, None, "cpu", searches=find)
        state = trainer.engine.state_dict()["controllers"]["thermostat"]
        assert state["priors"] == [list(prior) for prior in priors]

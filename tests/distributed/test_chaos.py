"""A run that is killed and spoilt at random ends as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.helpers.chaos import (
    Plan,
    Result,
    assert_healed,
    assert_same_bits,
    random_kills,
    random_spoils,
    run_to_the_end,
)

PLAN = Plan(world_size=2, total_steps=120)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_to_the_end(PLAN, tmp_path_factory.mktemp("undisturbed"), [], timeout_seconds=60)


def test_a_killed_run_ends_in_the_same_bits(undisturbed: Result, tmp_path: Path) -> None:
    kills = random_kills(PLAN, random.Random(0), 6)
    result = run_to_the_end(PLAN, tmp_path, kills, timeout_seconds=90)
    assert result.happened == {fault.name for fault in kills}
    assert 2 <= result.num_starts <= len(kills) + 1  # two may happen at once
    assert_same_bits(result, undisturbed)


def test_a_spoilt_run_heals(undisturbed: Result, tmp_path: Path) -> None:
    generator = random.Random(1)
    faults = random_kills(PLAN, generator, 3) + random_spoils(PLAN, generator, 6)
    result = run_to_the_end(PLAN, tmp_path, faults, timeout_seconds=90)
    assert result.happened == {fault.name for fault in faults}
    assert "left out: parameters are not finite" in result.log
    assert_healed(result, undisturbed)

import math

import pytest

from hdet.method.controller import equation8, first_controlled_sync, floor_matching, num_controlled_rounds
from hdet.method.fan_out import noise_std


def test_equation_8_grows_at_torchs_defaults() -> None:
    gamma = equation8(25.0, 1e4, num_rounds=100)
    assert gamma < 0
    assert (1 - gamma) ** 100 == pytest.approx(400)


def test_equation_8_by_hand() -> None:
    assert equation8(100.0, 10.0, 2) == pytest.approx(1 - math.sqrt(0.1))


def test_floor_matching_ends_at_the_true_floor_of_one_cycle() -> None:
    peak, rounds = 9e-4, 40
    floor = peak / (25.0 * 1e4)
    gamma = floor_matching(peak, floor, rounds)
    assert 0 < gamma < 1
    assert peak * (1 - gamma) ** rounds == pytest.approx(floor)


def test_rounds_under_control_are_the_papers_k() -> None:
    # S = 300,000, S_warm = 100,000, T = 1000.
    assert num_controlled_rounds(100_000, 1000, 300_000) == 200
    assert num_controlled_rounds(300_000, 1000, 300_000) == 0
    assert first_controlled_sync(100_000, 1000) == 100_000


def test_noise_by_hand() -> None:
    assert noise_std(0.01, norm=5.0, num_elements=25) == pytest.approx(0.01)

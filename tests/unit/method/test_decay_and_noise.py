import math

import pytest

from hdet.method.controller import decay_to, first_controlled_sync, num_controlled_rounds
from hdet.method.fan_out import noise_std


def equation8(div_factor: float, final: float, num_rounds: float) -> float:
    """As printed, with its sign."""
    return 1 - math.exp(-math.log(div_factor / final) / num_rounds)


def test_equation_8_with_a_final_fraction_is_the_decay_to_the_floor() -> None:
    for final_fraction in (1e-4, 1e-2, 0.5):
        printed = equation8(25.0, final_fraction, 200)
        assert printed == pytest.approx(decay_to(final_fraction / 25.0, 200), rel=1e-13)
        assert 9e-4 * (1 - printed) ** 200 == pytest.approx(9e-4 * final_fraction / 25, rel=1e-12)


def test_equation_8_with_torchs_divisor_grows() -> None:
    gamma = equation8(25.0, 1e4, num_rounds=100)
    assert gamma < 0 and gamma == pytest.approx(decay_to(1e4 / 25.0, 100), rel=1e-13)
    assert (1 - gamma) ** 100 == pytest.approx(400)


def test_the_decay_by_hand() -> None:
    assert decay_to(0.1, 2) == pytest.approx(1 - math.sqrt(0.1))
    assert decay_to(1.0, 7) == 0


def test_rounds_under_control_are_the_papers_k() -> None:
    # S = 300,000, S_warm = 100,000, T = 1000.
    assert num_controlled_rounds(100_000, 1000, 300_000) == 200
    assert num_controlled_rounds(300_000, 1000, 300_000) == 0
    assert first_controlled_sync(100_000, 1000) == 100_000


def test_noise_by_hand() -> None:
    assert noise_std(0.01, norm=5.0, num_elements=25) == pytest.approx(0.01)

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.method.fan_out import multipliers


def test_the_paper_setting_by_hand() -> None:
    # Eight replicas, spread 1/9, base 0.0009: the paper gives a range of 0.0008 to 0.001.
    values = [0.0009 * rho for rho in multipliers(8, 1 / 9)]
    assert values[0] == pytest.approx(0.0008)
    assert values[-1] == pytest.approx(0.001)


def test_two_replicas_take_the_ends() -> None:
    assert multipliers(2, 0.25) == [0.75, 1.25]


@given(st.integers(1, 1024), st.floats(0, 0.999))
def test_mean_is_one_and_range_is_the_spread(num_replicas: int, spread: float) -> None:
    rho = multipliers(num_replicas, spread)
    assert math.fsum(rho) / num_replicas == pytest.approx(1, abs=1e-12)
    assert min(rho) >= 1 - spread - 1e-12 and max(rho) <= 1 + spread + 1e-12
    assert rho == sorted(rho)


@given(st.integers(1, 64))
def test_spread_zero_is_exactly_one(num_replicas: int) -> None:
    assert multipliers(num_replicas, 0.0) == [1.0] * num_replicas


@given(st.integers(2, 64), st.floats(1, 1000))
def test_factors_on_the_log_scale_are_even_in_the_logarithm(num_replicas: int, span: float) -> None:
    logs = [math.log(rho) for rho in multipliers(num_replicas, span - 1, scale="log")]
    assert math.fsum(logs) == pytest.approx(0, abs=1e-9)
    assert logs[0] == pytest.approx(-math.log(span)) and logs[-1] == pytest.approx(math.log(span))
    gaps = [b - a for a, b in itertools.pairwise(logs)]
    assert max(gaps) - min(gaps) == pytest.approx(0, abs=1e-9)

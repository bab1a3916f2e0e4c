import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.method.controller import auto_temperature, joint_signals, softmax_weights, weighted_deviation
from hdet.method.fan_out import multipliers

LOSSES = st.lists(st.floats(-100, 100), min_size=2, max_size=16)


def test_weights_by_hand() -> None:
    # Mean 2; scores +1/0.5 = 2, 0, -2.
    weights = softmax_weights([1.0, 2.0, 3.0], temperature=0.5)
    total = math.exp(2) + 1 + math.exp(-2)
    assert weights == pytest.approx([math.exp(2) / total, 1 / total, math.exp(-2) / total])


@given(LOSSES, st.floats(0.01, 10), st.floats(-50, 50))
def test_weights_sum_to_one_ignore_a_shift_and_favour_lower_losses(
    losses: list[float], temperature: float, shift: float
) -> None:
    weights = softmax_weights(losses, temperature)
    assert math.fsum(weights) == pytest.approx(1)
    shifted = softmax_weights([loss + shift for loss in losses], temperature)
    assert shifted == pytest.approx(weights, abs=1e-6)
    best = losses.index(min(losses))
    assert weights[best] == max(weights)


def test_extreme_scores_do_not_overflow() -> None:
    assert softmax_weights([0.0, 1e6], 1e-3) == [1.0, 0.0]


def test_auto_temperature_is_the_population_standard_deviation() -> None:
    losses = [1.0, 2.0, 4.0, 8.0]
    assert auto_temperature(losses) == pytest.approx(statistics.pstdev(losses))
    assert softmax_weights([3.0, 3.0], auto_temperature([3.0, 3.0])) == [0.5, 0.5]


@given(LOSSES, st.floats(0.01, 100))
def test_auto_temperature_makes_weights_independent_of_the_unit(losses: list[float], unit: float) -> None:
    if statistics.pstdev(losses) < 1e-3:
        return
    scaled = [loss * unit for loss in losses]
    assert softmax_weights(scaled, auto_temperature(scaled)) == pytest.approx(
        softmax_weights(losses, auto_temperature(losses)), abs=1e-9
    )


def test_signal_points_to_the_better_replicas() -> None:
    values = [0.8, 1.0, 1.2]
    assert weighted_deviation(softmax_weights([3, 2, 1], 0.1), values) > 0
    assert weighted_deviation(softmax_weights([1, 2, 3], 0.1), values) < 0
    assert weighted_deviation([1 / 3] * 3, values) == pytest.approx(0)


def test_small_signal_gain() -> None:
    """For small loss differences, Delta / base is -(Var(rho) / sigma) times the slope on log value."""
    rho, sigma, slope = multipliers(8, 1 / 9), 0.1, 1e-4
    losses = [2.0 + slope * math.log(r) for r in rho]
    delta = weighted_deviation(softmax_weights(losses, sigma), rho)
    assert delta == pytest.approx(-statistics.pvariance(rho) / sigma * slope, rel=0.01)


@given(st.floats(-5, 5), st.floats(0.1, 10))
def test_the_joint_signal_is_bounded(slope: float, noise: float) -> None:
    x = [-1.0, -1 / 3, 1 / 3, 1.0]
    wiggle = [noise, -noise, -noise, noise]
    (z,) = joint_signals([x], [slope * a + b for a, b in zip(x, wiggle, strict=True)])
    assert -1 <= z <= 1


def test_a_single_joint_signal_is_the_correlation() -> None:
    assert joint_signals([[-1, 0, 1]], [0, 1, 0]) == [0]
    assert joint_signals([[-1, 0, 1]], [0, 1, 2]) == pytest.approx([-1])
    assert joint_signals([[0.0, 0.0]], [1.0, 2.0]) == [0]  # no spread
    x, losses = [-1.0, -0.5, 0.5, 1.0], [1.0, 4.0, 2.0, 3.0]
    assert joint_signals([x], losses)[0] == pytest.approx(-statistics.correlation(x, losses))


def test_what_the_replicas_cannot_tell_apart_is_shared() -> None:
    x = [-1.0, 1.0]
    assert joint_signals([x, x], [1.0, 0.0]) == pytest.approx([0.5, 0.5], rel=1e-3)
    assert joint_signals([x, [1.0, -1.0]], [1.0, 0.0]) == pytest.approx([0.5, -0.5], rel=1e-3)

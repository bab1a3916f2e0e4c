"""The thermostat by hand values: moves within bounds, and silence where it cannot know."""

from __future__ import annotations

import math

import pytest

from hdet.method.thermostat import (
    GUESS,
    LAST,
    MOST,
    MOST_PER_ROUND,
    Round,
    Thermostat,
    ThermostatState,
    has_jumped,
    posterior_mean,
    reading_of,
    rise_of,
    steered,
)

TOLD = Thermostat()


def a_round(
    k: int, *, noise: float, progress: float = 1.0, train: float | None = None, level: float = 5
) -> Round:
    """Make a round of a run that falls with ln t, with noise in proportion to the learning rate."""
    step, middle, shape = 10 * k, 10 * k - 4.5, k / 16
    mean = level - progress * math.log(middle)
    end = level - progress * math.log(step) + noise * shape
    return Round(step, middle, shape, end, mean, mean if train is None else train)


def run(**kinds: float) -> list[float]:
    """Drive the thermostat with rounds that do not heed it; ln of the factor after each."""
    state, seen = ThermostatState(), []
    for k in range(1, 17):
        state = steered(state, a_round(k, **kinds), TOLD)
        seen.append(state.log_factor)
    return seen


def test_gain_and_progress_are_read_without_the_lag_of_the_mean():
    rounds = [a_round(k, noise=0.3, progress=2.0) for k in range(1, 17)]
    read = reading_of(rounds)
    assert read == pytest.approx((0.3, 2.0, 0.0, 0.0), abs=1e-9)
    assert reading_of(rounds, factor=2.0).gain == pytest.approx(0.6)


def test_the_posterior_stays_with_a_guess_that_is_nearly_right_and_leaves_one_that_is_far_off():
    near, far = (posterior_mean(GUESS, measured, 0.6) for measured in (0.5, 3.0))
    assert 0 < near < 0.1 and 2.5 < far < 3.0
    assert posterior_mean([(0.5, 0.0, 1.0), (0.5, 2.0, 1.0)], 1.0, 1.0) == pytest.approx(1.0)


def test_it_moves_down_where_averaging_gains_much_and_up_where_it_gains_little():
    down, up, right = run(noise=9.0), run(noise=0.01), run(noise=TOLD.target)
    assert down[4] == up[4] == 0.0  # not before the sixth round
    assert down[5] == -MOST_PER_ROUND and up[5] == MOST_PER_ROUND
    assert down[-1] == down[LAST - 1] and min(down) >= -MOST
    assert max(map(abs, right)) < 0.01


@pytest.mark.parametrize("noise", [9.0, 0.3, 0.01])
def test_it_moves_below_zero_as_it_does_above(noise):
    assert run(noise=noise, level=-50.0) == pytest.approx(run(noise=noise, level=50.0), abs=1e-9)
    assert run(noise=noise, level=-50.0)[5] != 0.0


@pytest.mark.parametrize("level", [-3.0, -50.0])
def test_below_zero_a_jump_is_measured_by_the_fall(level):
    """It has fallen by 2, and rises by 0.4 and by 0.6."""
    seen = [Round(k, k, 1.0, loss, loss, loss) for k, loss in enumerate((level, level - 2, level - 1.6))]
    assert not has_jumped(seen) and rise_of(seen) == pytest.approx((0.2, 0.2))
    assert has_jumped([*seen[:2], Round(2, 2, 1.0, level - 1.4, level - 1.4, level - 1.4)])


def test_gain_and_progress_that_are_both_negative_move_nothing():
    assert run(noise=-1.0, progress=-1.0, train=1.0) == [0.0] * 16


def test_a_jump_of_the_training_loss_moves_down_and_forbids_the_way_up():
    state, small = ThermostatState(), 0.01
    for k in range(1, 8):
        state = steered(state, a_round(k, noise=small, train=3.0 - 0.2 * k), TOLD)
    before, jumped = state.log_factor, a_round(8, noise=small, train=2.4)
    assert steered(state, jumped, TOLD).log_factor >= before  # the probe knows of no jump
    state = steered(state, jumped._replace(end=3.0), TOLD)
    assert state.log_factor == before - MOST_PER_ROUND
    state = steered(state, a_round(9, noise=small, train=1.5), TOLD)
    assert state.log_factor == before - MOST_PER_ROUND


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_it_is_silent_where_a_loss_is_not_finite_or_has_nearly_vanished(bad):
    state = ThermostatState()
    for k in range(1, 10):
        state = steered(state, a_round(k, noise=9.0)._replace(end=bad), TOLD)
    assert state.log_factor == 0.0
    for k in range(1, 10):
        mean = 5.0 if k == 1 else 0.1 / k
        state = steered(state, a_round(k, noise=9.0)._replace(mean=mean, end=mean + 1), TOLD)
    assert state.log_factor == 0.0

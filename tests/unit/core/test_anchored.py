"""The anchored controller's update, by hand; and on a run whose best learning rate is known."""

import itertools
import math
import random

import pytest

from hdet.core.anchored import (
    AnchoredController,
    AnchoredState,
    anchored_update,
    next_control,
)
from hdet.core.loss_watch import LossWatch, watch_loss

SETTINGS = AnchoredController(limit=100.0)


def test_the_first_updates_by_hand():
    state, z = anchored_update(AnchoredState(), 2.0, 0.5, SETTINGS, acts=True, highest=100.0)
    assert (state.mean, state.mean_square) == pytest.approx((0.6, 0.4))
    assert (z, state.log_factor) == pytest.approx((1.0, -0.5))
    state, z = anchored_update(state, -1.0, 0.2, SETTINGS, acts=True, highest=100.0)
    mean, square = 0.7 * 0.6 - 0.3, 0.9 * 0.4 + 0.1
    assert (state.mean, state.mean_square) == pytest.approx((mean, square))
    expected = (mean / (1 - 0.7**2)) / math.sqrt(square / (1 - 0.9**2))
    assert z == pytest.approx(expected)
    assert state.log_factor == pytest.approx(-0.5 - expected * 0.2)


def test_it_may_watch_without_moving_and_stays_in_its_limits():
    state, z = anchored_update(AnchoredState(), -2.0, 0.5, SETTINGS, acts=False, highest=100.0)
    assert (state.log_factor, round(z, 9), state.num_controls) == (0.0, -1.0, 1)
    state = AnchoredState()
    for _ in range(50):
        state, _ = anchored_update(state, -2.0, 0.5, AnchoredController(limit=3.0), acts=True, highest=1.5)
    assert state.log_factor == pytest.approx(math.log(1.5))
    for _ in range(50):
        state, _ = anchored_update(state, 2.0, 0.5, AnchoredController(limit=3.0), acts=True, highest=1.5)
    assert state.log_factor == pytest.approx(-math.log(3))


def test_no_signal_moves_nothing():
    state, z = anchored_update(AnchoredState(), 0.0, 0.5, SETTINGS, acts=True, highest=100.0)
    assert (state.log_factor, z) == (0.0, 0.0)


def test_control_times_are_even_in_log_time():
    times = [0]
    while times[-1] < 100_000:
        times.append(next_control(times[-1], 100_000))
    gaps = [math.log(b / a) for a, b in itertools.pairwise(times[1:])]
    assert times[1] == 400
    assert max(gaps) < 0.0325
    assert min(gaps) > 0.0275


def watched(losses, watch=None):
    """At which of them the controller brakes, and what it remembers."""
    brakes, watch = [], watch or LossWatch()
    for i, loss in enumerate(losses):
        watch, is_spoilt = watch_loss(watch, loss)
        if is_spoilt:
            brakes.append(i)
    return brakes, watch


FALLING = [5.0, 4.0, 3.0, 2.9, 2.8, 2.8, 2.7, 2.8, 2.7, 2.6, *[2.7, 2.6] * 15]


def test_a_jump_of_the_loss_brakes_once_and_a_new_high_again():
    brakes, watch = watched(FALLING)
    assert brakes == []
    assert watched([3.6, 3.5, 3.6, 3.2, 2.6], watch)[0] == [0]
    assert watched([3.6, 3.5, 3.7, 9.0, 2.6], watch)[0] == [0, 2, 3]


def test_it_sees_a_second_jump_as_it_saw_the_first():
    _, watch = watched([*FALLING, 12.0, 11.0, 2.7, 2.6])
    assert watched([3.1], watch)[0] == [0]


def test_noise_and_a_run_that_has_gained_nothing_do_not_brake():
    draw = random.Random(0)
    noisy = [3 * math.exp(-i / 20) + draw.gauss(2.0, 0.3) for i in range(300)]
    assert watched(noisy)[0] == []
    assert watched([draw.gauss(2.0, 0.3) for _ in range(300)])[0] == []

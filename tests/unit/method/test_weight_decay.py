"""The rule of the weight decay: which way, how far, and when it stays."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.method.weight_decay import DecayState, Look, joined_look, least_strength, look_of, moved

TOLD = {"training_loss": 0.0, "share_done": 0.5, "least": 0.01}
finite = st.floats(-10, 10)


def after_one(strength: float, look: Look, *, gap: float = 1.0) -> DecayState:
    return DecayState(strength, look.slope, look.variance, gap, 1)


def test_decay_is_added_by_confidence_where_two_looks_say_that_smaller_weights_would_be_better():
    sure, unsure, other = Look(-1.0, 1e-9, 1.0), Look(-1.0, 1.0, 1.0), Look(1.0, 1e-9, 1.0)
    assert moved(DecayState(1.0), sure, **TOLD).strength == 1.0  # one look says nothing
    assert moved(after_one(1.0, other), sure, **TOLD).strength == 1.0
    assert moved(after_one(1.0, sure), sure, **TOLD).strength == pytest.approx(3.0)
    # One standard error from zero: erf(1 / sqrt 2) = 0.6827.
    assert moved(after_one(1.0, sure), unsure, **TOLD).strength == pytest.approx(1 + 2 * 0.6827, rel=1e-4)
    both = moved(after_one(1.0, unsure), unsure, **TOLD)
    assert both.strength == pytest.approx(1 + 2 * 0.6827**2, rel=1e-4)
    # What is there already grows by its share.
    assert moved(after_one(20.0, sure), sure, **TOLD).strength == pytest.approx(27.0)
    assert moved(after_one(55.0, sure), sure, **TOLD).strength == 60.0
    # A start beyond the most is the user's, and stays.
    assert moved(after_one(90.0, sure), sure, **TOLD).strength == 90.0


@pytest.mark.parametrize(
    ("training_loss", "before", "added"), [(0.0, 1.0, 2.0), (0.5, 0.5, 1.0), (0.4, 0.0, 0.6), (1.5, 0.1, 0.0)]
)
def test_decay_is_added_by_the_share_of_the_held_out_loss_that_training_has_not(training_loss, before, added):
    sure = Look(-1.0, 1e-9, 1.0)
    told = TOLD | {"training_loss": training_loss}
    assert moved(after_one(1.0, sure, gap=before), sure, **told).strength == pytest.approx(1.0 + added)


def test_decay_is_taken_away_only_late_and_where_nothing_overfits():
    hurts = Look(1.0, 1e-9, 1.0)
    start = after_one(8.0, hurts, gap=0.0)
    told = {"least": 0.01}
    assert moved(start, hurts, training_loss=1.0, share_done=0.5, **told).strength == 4.0
    assert moved(start, hurts, training_loss=1.0, share_done=0.3, **told).strength == 8.0
    assert moved(start, hurts, training_loss=0.4, share_done=0.5, **told).strength == 8.0
    half = moved(start, hurts, training_loss=0.75, share_done=0.5, **told)  # a gap of an eighth in the mean
    assert half.strength == pytest.approx(8.0 / math.sqrt(2))
    assert moved(start, hurts, training_loss=1.0, share_done=0.5, least=6.0).strength == 6.0
    assert least_strength(1.0) == 1.0 and least_strength(100.0) == 5.0


@pytest.mark.parametrize(("loss", "training_loss"), [(-5.0, -6.0), (1.0, -1.0), (-0.1, 0.1)])
@pytest.mark.parametrize("slope", [-1.0, 1.0])
def test_nothing_moves_where_a_loss_is_below_zero(loss, training_loss, slope):
    look = Look(slope, 1e-9, loss)
    assert moved(after_one(8.0, look), look, **TOLD | {"training_loss": training_loss}).strength == 8.0


def test_the_last_look_and_the_mean_of_gaps_are_kept():
    told = TOLD | {"training_loss": 0.1}
    state = moved(after_one(1.0, Look(-1.0, 0.04, 1.0), gap=0.9), Look(2.0, 0.02, 2.0), **told)
    assert state == DecayState(1.0, 2.0, 0.02, pytest.approx((0.9 + 0.95) / 2), 2)


@given(finite, st.floats(0, 10), st.floats(0.01, 10), st.floats(0.01, 100), st.floats(0, 1), st.floats(0, 10))
def test_the_strength_stays_between_its_bounds(slope, variance, loss, strength, share, training_loss):
    least = least_strength(strength)
    state = moved(
        after_one(strength, Look(slope, variance, loss), gap=0.0),
        Look(slope, variance, loss),
        training_loss=training_loss,
        share_done=share,
        least=least,
    )
    assert min(least, strength) <= state.strength <= max(60.0, strength)
    assert (state.strength - strength) * slope <= 0  # never against what was seen


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=2, max_size=12))
def test_the_slope_is_the_mean_of_the_parts_and_a_probe_in_parts_is_the_whole(pairs):
    low, high = zip(*pairs, strict=True)
    look = look_of(low, high)
    width = math.log(1.05 / 0.95)
    assert look.slope == pytest.approx((sum(low) - sum(high)) / len(low) / width, abs=1e-9)
    assert look.loss == pytest.approx((sum(low) + sum(high)) / 2 / len(low), abs=1e-9)
    assert joined_look([look, look]) == pytest.approx(look)

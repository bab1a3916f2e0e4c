"""The decisions of find_lr."""

from __future__ import annotations

import math

import pytest

from hdet.search.decisions import (
    Ramp,
    Trial,
    answer,
    lengths,
    next_ramp,
    should_lengthen,
    should_move,
    weigh,
)


def ramp_of(losses, sizes):
    ramp = Ramp()
    for loss in losses:
        ramp = next_ramp(ramp, loss, sizes)
        if ramp.is_over:
            break
    return ramp


def test_a_ramp_ends_when_the_loss_turns_or_is_lost_and_else_at_its_length():
    sizes = lengths(1000, 8)
    falling = [4.0 - 0.05 * step for step in range(30)]
    assert not ramp_of(falling, sizes).is_over
    turned = ramp_of([*falling, *[3.9] * 10], sizes)
    assert turned.is_over and turned.num_steps < 40 and turned.low_step in (29, 30)
    assert ramp_of([*falling, math.nan], sizes).low_step == 29
    assert ramp_of([4.0] * 20 + [9.0] * 5, sizes).num_steps <= 25  # it never learnt, and is worse
    flat = ramp_of([4.0] * 100, sizes)
    assert flat.num_steps == sizes.most_ramp_steps == 60


@pytest.mark.parametrize(
    "scores, moves", [([3, 2, 1], True), ([2, 1, 3], False), ([3, 2, None], False), ([3, 1, 1], False)]
)
def test_trials_move_up_while_the_highest_is_the_best(scores, moves):
    trials = [Trial(10.0**i, score) for i, score in enumerate(scores)]
    assert should_move(trials, 50, 1000) == moves
    assert not should_move(trials, 100, 1000)  # too much was spent


def test_trials_are_lengthened_while_nothing_has_been_learnt():
    plateau, learnt = [Trial(1.0, 3.9), Trial(3.0, 3.8)], [Trial(1.0, 3.9), Trial(3.0, 3.0)]
    assert should_lengthen(plateau, 4.0, 50, 1000)
    assert not should_lengthen(plateau, 4.0, 100, 1000)
    assert not should_lengthen(learnt, 4.0, 50, 1000)


def test_long_trials_count_for_more_and_trials_that_learnt_little_for_less():
    def factor(num_steps, first_score):
        trials = [Trial(1.0, 3.0), Trial(10.0, 2.0), Trial(100.0, 3.0)]
        return answer(trials, first_score, lengthened=num_steps / 40).factor

    assert 1 < factor(10, 4.0) < factor(40, 4.0) < factor(160, 4.0) < 10.001
    assert factor(40, 2.1) < factor(40, 4.0)


@pytest.mark.parametrize(
    "scores, why",
    [
        ([None, None, 1.0], "fewer than two"),
        ([2.0, 2.0, 2.0], "the same"),
        ([5.0, 4.5, 6.0], "no trial"),
    ],
)
def test_the_users_number_stays_where_trials_say_nothing(scores, why):
    trials = [Trial(10.0**i, score) for i, score in enumerate(scores)]
    found = answer(trials, 4.0)
    assert found.factor == 1 and found.evidence is None and why in found.reason
    assert found.low < 0.1 and found.high > 10


def test_the_posterior_lies_between_the_user_and_the_trials_and_is_symmetric():
    for evidence in (0.3, 1.0, 2.3, 4.6):
        mean = weigh(evidence, 0.6)
        assert 0 < mean < evidence
        assert weigh(-evidence, 0.6) == pytest.approx(-mean)
    assert weigh(2.0, 1e-6) == pytest.approx(2.0)
    assert weigh(2.0, 100.0) < 0.3

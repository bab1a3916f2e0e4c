"""The decisions of find_lr."""

from __future__ import annotations

import math

import pytest

from hdet.search.decisions import (
    Ramp,
    Trial,
    answer,
    lengths,
    next_lead,
    next_ramp,
    should_lengthen,
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
    "scores, lead",
    [([3, 2, 1], 1000), ([2, 1, 3], None), ([3, 2, None], None), ([1, 2, 3], 3), ([None, None, 1], 1000)],
)
def test_trials_move_on_while_the_best_is_at_an_end(scores, lead):
    trials = [Trial(10.0**i, score) for i, score in enumerate(scores)]
    assert next_lead(trials, 4.0, 250, 1000) == lead
    assert next_lead(trials, 4.0, 251, 1000) is None  # too much would be spent


def test_trials_do_not_move_down_where_nothing_was_learnt():
    trials = [Trial(1.0, 4.0), Trial(10.0, 5.0)]
    assert next_lead(trials, 4.1, 100, 1000) is None and next_lead(trials, 5.0, 100, 1000) == 3


def test_trials_reach_the_guess_before_they_may_lower_it():
    trials = [Trial(0.01, 3.0), Trial(0.3, 2.0)]
    assert next_lead(trials, 4.0, 900, 1000) == 3.0  # whatever it costs
    assert next_lead([*trials, Trial(3.0, 1.9)], 4.0, 900, 1000) is None
    assert next_lead([*trials, Trial(3.0, None)], 4.0, 900, 1000) is None
    assert next_lead(trials, 2.1, 900, 1000) is None  # nothing was learnt


def test_trials_are_lengthened_while_nothing_has_been_learnt():
    plateau, learnt = [Trial(1.0, 3.9), Trial(3.0, 3.8)], [Trial(1.0, 3.9), Trial(3.0, 3.0)]
    assert should_lengthen(plateau, 4.0, 250, 1000)
    assert not should_lengthen(plateau, 4.0, 251, 1000)
    assert not should_lengthen(learnt, 4.0, 50, 1000)


def test_where_steps_shrink_with_age_the_run_needs_more_than_a_trial():
    trials = [Trial(0.3, 3.0), Trial(1.0, 2.0), Trial(3.0, 3.0)]
    plain, aged = answer(trials, 4.0), answer(trials, 4.0, growth=5.0)
    assert plain.evidence == pytest.approx(1.0, rel=0.1)
    assert aged.evidence == pytest.approx(5 * plain.evidence)
    assert 1 < aged.factor < aged.evidence  # weighed against the guess as ever


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

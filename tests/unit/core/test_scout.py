"""The scout's decisions, on responses whose best learning rate is known."""

import json
import math

import pytest

from hdet.core.scout import (
    Scout,
    ScoutState,
    advance,
    least_steps,
    may_move,
    next_fan,
    soft_minimum,
    steps_per_fan,
)

SETTINGS = Scout()


def scouted(response, num_replicas=8, settings=SETTINGS):
    """Run the scout on a function of the factor; the state and the number of fans."""
    state, num_fans = ScoutState(), 0
    while state.stage != "done":
        state, factors = next_fan(state, settings, num_replicas)
        moves = state.num_moves < settings.max_moves
        state, _ = advance(state, factors, [response(f) for f in factors], may_move=moves)
        num_fans += 1
        assert num_fans < 60
    return state, num_fans


def valley(best, width=1.0):
    return lambda factor: 2 + (math.log(factor / best) / width) ** 2


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5, 8, 16, 64])
@pytest.mark.parametrize("best", [0.05, 0.3, 1.0, 7.0])
def test_a_valley_is_found_with_any_number_of_replicas(num_replicas, best):
    state, num_fans = scouted(valley(best), num_replicas)
    assert abs(math.log(state.chosen / best)) < math.log(1.35)
    assert num_fans == 2 * math.ceil(6 / num_replicas)
    assert state.low < state.chosen < state.high


@pytest.mark.parametrize("best", [1e-4, 1e-3, 1e3, 1e4])
def test_the_range_is_moved_to_a_best_outside_it(best):
    state, num_fans = scouted(valley(best))
    assert abs(math.log(state.chosen / best)) < math.log(1.35)
    assert num_fans > 2


def test_the_range_is_moved_only_so_often():
    state, num_fans = scouted(lambda f: -math.log(f))  # the higher the better, without end
    assert num_fans == 1 + SETTINGS.max_moves + 1
    assert state.reason == "the best is at the edge of what was tested"
    assert state.chosen > 1e5


@pytest.mark.parametrize("edge", [1e-5, 0.0101, 0.02])
def test_a_plan_far_above_what_trains_is_moved_down(edge):
    """None, one or two of the first fan survive; the best is a little below the edge of stability."""
    state, num_fans = scouted(lambda f: valley(edge / 3)(f) if f < edge else None)
    assert abs(math.log(state.chosen / (edge / 3))) < math.log(1.5)
    assert num_fans > 2


def test_failing_replicas_are_the_worst_and_bound_what_is_chosen():
    def cliff(factor):
        return valley(1.0)(factor) if factor < 3 else None

    state, _ = scouted(cliff)
    assert 0.5 < state.chosen < 2
    assert state.chosen < state.ceiling < 4
    state, _ = scouted(lambda f: math.nan if f > 3 else valley(1.0)(f))
    assert state.ceiling < 4
    state, _ = scouted(lambda f: 1e6 if f > 3 else valley(1.0, width=4)(f))  # finite, but spoilt
    assert state.ceiling < 5  # the next larger one that was tested is 7
    assert scouted(valley(1.0))[0].ceiling == math.inf


def test_a_trial_that_loses_what_the_first_stage_gained_was_not_stable():
    state = ScoutState()
    state, factors = next_fan(state, SETTINGS, 8)
    state, _ = advance(state, factors, [valley(1.0)(f) for f in factors], may_move=False)
    lead = min(s for s in state.scores if s is not None)
    state, factors = next_fan(state, SETTINGS, 8)
    scores = [lead - 1 + 0.1 * math.log(f) ** 2 for f in factors]
    for lost, is_bound in ((0.5, False), (5.0, True)):  # of about 20 that were gained
        trial, _ = advance(state, factors, [*scores[:-1], lead + lost], may_move=False)
        assert trial.stage == "done"
        assert (trial.ceiling < factors[-1]) is is_bound


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (lambda f: 3.0, "the loss is the same over the whole range"),
        (lambda f: 3.0 + 1e-5 * math.log(f), "the loss is the same over the whole range"),
        (lambda f: None, "no replica had a finite score"),
    ],
)
def test_what_says_nothing_changes_nothing(response, reason):
    state, _ = scouted(response)
    assert (state.chosen, state.low, state.high, state.reason) == (1.0, 1.0, 1.0, reason)


def test_losses_below_zero_are_as_good_as_others():
    state, _ = scouted(lambda f: valley(0.3)(f) - 100)
    assert abs(math.log(state.chosen / 0.3)) < math.log(1.35)


def test_noise_moves_the_soft_minimum_little():
    points = [(math.exp(x / 4), 1 + (x / 4) ** 2 + 0.3 * math.sin(9 * x)) for x in range(-6, 7)]
    center, spread = soft_minimum(points)
    assert abs(math.log(center)) < 0.25
    assert 1.05 < spread < 1.6


def test_lengths_follow_the_run():
    assert steps_per_fan(Scout(fraction=0.1), 8, 1000) == {"wide": 25, "narrow": 75}
    # Six learning rates per stage, one by one.
    assert steps_per_fan(Scout(fraction=0.12), 1, 10_000) == {"wide": 50, "narrow": 150}
    assert steps_per_fan(Scout(steps=33), 8, None) == {"wide": 16, "narrow": 50}


def test_the_transfer_is_by_batch_and_horizon():
    assert Scout().transfer(8, 0.01, is_adaptive=True) == pytest.approx(8**0.27 * 0.01**0.2)
    assert Scout().transfer(8, 0.01, is_adaptive=False) == pytest.approx(8**0.75 * 0.01**0.25)
    assert Scout(batch_exponent=0.5, horizon_exponent=0.0).transfer(4, 0.1, is_adaptive=True) == 2.0
    assert Scout(data_repeats=True).transfer(8, 0.001, is_adaptive=True) == pytest.approx(0.1)


def test_the_second_stage_has_its_own_response():
    """From better weights the best learning rate is lower, and the losses are."""
    state, num_fans = ScoutState(), 0
    while state.stage != "done":
        state, factors = next_fan(state, SETTINGS, 8)
        response = valley(1.0) if state.stage == "wide" else lambda f: valley(0.2)(f) - 1.5
        state, leader = advance(state, factors, [response(f) for f in factors], may_move=True)
        num_fans += 1
        if num_fans == 1:
            assert leader == min(range(8), key=lambda i: abs(math.log(factors[i])))
        else:
            assert leader is None  # only the first stage has one
    assert num_fans == 2
    assert abs(math.log(state.chosen / 0.2)) < math.log(1.2)


def test_the_leader_is_the_best_of_all_fans_of_the_first_stage():
    state = ScoutState()
    fans = ([3.0, 2.0], [2.5, 2.6], [1.5, None])
    leaders = []
    for scores in fans:
        state, factors = next_fan(state, SETTINGS, 2)
        state, leader = advance(state, factors, scores, may_move=True)
        leaders.append(leader)
    assert leaders == [1, None, 0]
    assert state.stage == "narrow"


@pytest.mark.parametrize("num_replicas", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [1, 2, 5])
def test_the_scout_never_takes_more_than_half_of_the_run(num_replicas, share):
    """The best is at the edge of every range, so that each move is wanted."""
    total = share * least_steps(SETTINGS, num_replicas)
    state, used = ScoutState(), 0
    while state.stage != "done":
        state, factors = next_fan(state, SETTINGS, num_replicas)
        used += steps_per_fan(SETTINGS, num_replicas, total)[state.stage]
        moves = may_move(state, SETTINGS, num_replicas, total, used)
        sign = -1 if state.stage == "wide" else 1
        state, _ = advance(state, factors, [sign * math.log(f) + 100 for f in factors], may_move=moves)
    assert used <= total / 2
    assert state.is_found


@pytest.mark.parametrize(("at_two", "ceiling"), [(0.30, math.sqrt(2.0 * 6.4)), (0.9, math.sqrt(1.0 * 2.0))])
def test_where_both_stages_have_tested_the_second_decides_what_is_stable(at_two, ceiling):
    # From far above: the lowest of the wide trials has trained, and 1.6 is worse than it within a few steps.
    state = ScoutState(
        stage="narrow",
        factors=(0.1, 0.4, 1.6, 6.4),
        scores=(0.42, 0.41, 0.43, None),
        num_wide=4,
        center=0.5,
        half_width=math.log(4),
        grid=(1.0,) * 5,
    )
    state, _ = advance(state, [0.125, 0.25, 0.5, 1.0, 2.0], [0.38, 0.35, 0.30, 0.31, at_two], may_move=False)
    assert state.stage == "done"
    assert state.ceiling == pytest.approx(ceiling)


def test_where_the_second_stage_fails_the_first_one_decides():
    state = ScoutState()
    state, factors = next_fan(state, SETTINGS, 8)
    state, _ = advance(state, factors, [valley(0.1)(f) if f < 0.5 else None for f in factors], may_move=True)
    assert state.stage == "narrow"
    assert ScoutState.from_json(json.loads(json.dumps(state.to_json()))) == state
    state, factors = next_fan(state, SETTINGS, 8)
    state, _ = advance(state, factors, [None] * 8, may_move=True)
    assert (state.stage, state.is_found) == ("done", True)
    assert 0.03 < state.chosen < 0.3
    assert state.ceiling < 1
    assert state.reason == "no trial of the second stage had a finite score"


def test_two_points_are_weighed_by_their_own_distance():
    center, _ = soft_minimum([(1.0, 0.001), (10.0, 0.1)])
    assert center == pytest.approx(10 ** (math.exp(-1) / (1 + math.exp(-1))))

"""The thermostat: the law by hand, moves within bounds, and silence where it cannot know."""

from __future__ import annotations

import math

import pytest

from research.compare.ledger import Record
from research.thermostat.experiment import best_of
from research.thermostat.law import gain_and_progress, rounds_of
from research.thermostat.loop import Round, Settings, State, posterior_mean, reading_of, steered
from research.thermostat.summary import law_tables
from research.thermostat.verdict import loop_tables

SETTINGS = Settings()


def a_round(k: int, *, noise: float, progress: float = 1.0, train: float | None = None) -> Round:
    """Make a round of a run that falls with ln t, with noise in proportion to the learning rate."""
    step, middle, shape = 10 * k, 10 * k - 4.5, k / 16
    mean = 5 - progress * math.log(middle)
    end = 5 - progress * math.log(step) + noise * shape
    return Round(step, middle, shape, shape, end, mean, mean if train is None else train)


def run(**kinds: float) -> list[float]:
    """Drive the thermostat with rounds that do not heed it; ln of the factor after each."""
    state, seen = State(), []
    for k in range(1, 17):
        state = steered(state, a_round(k, **kinds), SETTINGS)
        seen.append(state.log_factor)
    return seen


def test_gain_and_progress_are_read_without_the_lag_of_the_mean():
    rounds = [a_round(k, noise=0.3, progress=2.0) for k in range(1, 17)]
    assert gain_and_progress(rounds) == pytest.approx((0.3, 2.0))
    read = reading_of(rounds)
    assert read == pytest.approx((0.3, 2.0, 0.0, 0.0), abs=1e-9)
    assert reading_of(rounds, factor=2.0).gain == pytest.approx(0.6)
    assert gain_and_progress(rounds[:15]) is None


def test_the_posterior_stays_with_a_guess_that_is_nearly_right_and_leaves_one_that_is_far_off():
    near, far = (posterior_mean(SETTINGS.priors, measured, 0.6) for measured in (0.5, 3.0))
    assert 0 < near < 0.1 and 2.5 < far < 3.0
    assert posterior_mean([(0.5, 0.0, 1.0), (0.5, 2.0, 1.0)], 1.0, 1.0) == pytest.approx(1.0)


def test_it_moves_down_where_averaging_gains_much_and_up_where_it_gains_little():
    down, up, right = run(noise=9.0), run(noise=0.01), run(noise=SETTINGS.target)
    assert down[4] == up[4] == 0.0  # not before the sixth round
    assert down[5] == -SETTINGS.most_per_round and up[5] == SETTINGS.most_per_round
    assert down[-1] == down[SETTINGS.last - 1] and min(down) >= -SETTINGS.most
    assert max(map(abs, right)) < 0.01


def test_gain_and_progress_that_are_both_negative_move_nothing():
    assert run(noise=-1.0, progress=-1.0, train=1.0) == [0.0] * 16


def test_a_jump_of_the_training_loss_moves_down_and_forbids_the_way_up():
    state, small = State(), 0.01
    for k in range(1, 8):
        state = steered(state, a_round(k, noise=small, train=3.0 - 0.2 * k), SETTINGS)
    before = state.log_factor
    state = steered(state, a_round(8, noise=small, train=2.4), SETTINGS)
    assert state.log_factor == before - SETTINGS.most_per_round
    state = steered(state, a_round(9, noise=small, train=1.5), SETTINGS)
    assert state.log_factor == before - SETTINGS.most_per_round


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_it_is_silent_where_a_loss_is_not_finite_or_has_nearly_vanished(bad):
    state = State()
    for k in range(1, 10):
        state = steered(state, a_round(k, noise=9.0)._replace(end=bad), SETTINGS)
    assert state.log_factor == 0.0
    for k in range(1, 10):
        mean = 5.0 if k == 1 else 0.1 / k
        state = steered(state, a_round(k, noise=9.0)._replace(mean=mean, end=mean + 1), SETTINGS)
    assert state.log_factor == 0.0


def record(method: str, factor: float, loss: float, noise: float, seed: int = 0) -> Record:
    lr = float(f"{factor * best_of('kjv_gru').lr:.4g}")
    rounds = [a_round(k, noise=noise) for k in range(1, 21)]
    columns = {name: [getattr(r, name) for r in rounds] for name in ("lr", "end", "mean", "train")}
    columns |= {"train_end": columns["end"], "train_mean": columns["mean"], "wide": columns["mean"]}
    result = {"final_loss": loss, "steps": 400, "factor": 1.0, "rounds": columns, "seconds": 1.0}
    return {"problem": "kjv_gru", "method": method, "start": factor, "lr": lr, "seed": seed} | result


def test_a_saved_run_gives_its_rounds_back():
    (first, *_, last) = rounds_of(record("plain", 1.0, 2.0, 0.25))
    assert first == pytest.approx(a_round(1, noise=0.25)._replace(shape=first.shape))
    assert (last.step, last.middle) == (200, 195.5)


def test_tables_have_the_law_and_the_loop():
    curve = ((0.2, 2.2, 0.02), (0.45, 2.1, 0.05), (1.0, 2.0, 0.25), (2.2, 2.1, 1.0), (5.0, 4.0, 9.0))
    records = [record("plain", *point) for point in curve]
    text = law_tables(records)
    assert "| kjv_gru | 0.02 | 0.05 | 0.25 | 1.00 | 9.00 | 1.100 | 1.050 | 1.000 | 1.050 | 2.000 |" in text
    records += [record("thermostat", f, loss, 0.25) for f, loss in ((0.2, 2.04), (1.0, 2.0), (5.0, 2.12))]
    assert "| kjv_gru | 1.100 1.020 (1.00) | 1.000 1.000 (1.00) | 2.000 1.060 (1.00) |" in loop_tables(
        records
    )

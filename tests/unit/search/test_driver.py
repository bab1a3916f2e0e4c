"""The driver of a search, with a trainee that has no framework: one number, and a loss that is known."""

from __future__ import annotations

import itertools
import math

import pytest

import hdet
from hdet.search.driver import Search
from hdet.search.progress import ProgressLine


class Valley:
    """Scores trials by how far their learning rate is from the best one. A ramp learns until there."""

    asked = (0.0, 1e-3)
    steps_shrink = False

    def __init__(self, best: float, floor: float = 1.0) -> None:
        self.best, self.floor = best, floor
        self.factor, self.num_kept, self.trial_lengths = 1e-3, 0, []
        self.ramp_batches, self.trial_batches = [], []

    def num_trials_at_once(self, batch):
        assert batch == 0
        return 4

    def has_enough(self, batch):
        return batch % 5 != 4

    def without_bad(self, batches):
        return [batch for batch in batches if batch != 2]

    def score(self, batches):
        if 2 in batches:
            return math.nan
        assert len(batches) in (1, 3)
        return self.floor + abs(math.log(self.factor / self.best)) if self.factor < 60 else math.nan

    def begin_ramp(self):
        self.num_kept = 0

    def ramp_step(self, factor, batch):
        self.factor = factor
        self.ramp_batches.append(batch)

    def keep_weights(self):
        self.num_kept += 1

    def try_out(self, factors, turns, probe, told):
        assert probe == [0, 1, 3]
        for batches in turns:
            self.trial_lengths.append(len(batches))
            self.trial_batches += batches
            told(4 * len(batches))
        return [self.floor + abs(math.log(factor / self.best)) for factor in factors]

    def num_bad(self):
        return 1


def search(trainee, **settings):
    given = {"probe": None, "total_steps": 1000, "progress": ProgressLine(False)} | settings
    return Search(trainee, itertools.count(), **given).run()


def test_the_answer_is_in_the_valley_and_counts_what_was_left_out():
    found = search(trainee := Valley(best=5.0))
    assert found.asked == [0.0, 1e-3] and found.lr[0] == 0
    assert 2e-3 < found.lr[1] < 6e-3
    assert found.reason.endswith("; 1 batches whose loss is not finite were left out")
    assert found.num_steps == len(found.ramp) + sum(trainee.trial_lengths)
    assert len(found.trials) == 4 * len(trainee.trial_lengths) and trainee.num_kept > 20


def test_batches_come_in_order_and_trials_take_those_that_can_be_split():
    search(trainee := Valley(best=5.0))
    assert trainee.ramp_batches == list(range(4, 4 + len(trainee.ramp_batches)))
    assert all(batch % 5 != 4 for batch in trainee.trial_batches)
    assert trainee.trial_batches == sorted(set(trainee.trial_batches))


def test_a_ramp_ends_where_the_loss_is_lost_and_says_so():
    found = search(Valley(best=50.0))
    assert found.ramp[-1][1] == math.inf and all(math.isfinite(loss) for _, loss in found.ramp[:-1])


def test_a_loss_that_differs_from_call_to_call_is_told():
    class Noisy(Valley):
        num_scores = 0

        def score(self, batches):
            self.num_scores += 1
            return super().score(batches) * (1 + 0.01 * (self.num_scores % 2))

    assert "differs from call to call" in search(Noisy(best=5.0)).reason
    assert "differs" not in search(Valley(best=5.0)).reason


class Mountain(Valley):
    """Nothing is learnt in the ramp."""

    def score(self, batches):
        return math.nan if 2 in batches else 40.0


def test_higher_ones_are_tried_where_the_highest_is_the_best():
    trainee = Mountain(best=3e4)
    found = search(trainee, total_steps=5000)
    assert len(trainee.trial_lengths) > 1 and len(found.trials) == 4 * len(trainee.trial_lengths)
    tops = [lr for lr, _ in found.trials[3::4]]
    assert tops == pytest.approx([tops[0] * 10**i for i in range(len(tops))])


def test_trials_that_learn_nothing_are_made_again_at_twice_the_length():
    trainee = Mountain(best=1e-3, floor=39.0)
    found = search(trainee, total_steps=5000)
    assert trainee.trial_lengths == [89, 178, 356]
    assert len(found.trials) == 4 and "no trial learnt anything" in found.reason


def test_an_optimizer_whose_steps_shrink_gets_more_than_its_trials_say():
    plain, aged = Valley(best=5.0), Valley(best=5.0)
    aged.steps_shrink = True
    low, high = search(plain).lr[1], search(aged).lr[1]
    assert 3 * low < high < 8 * low  # 5 times, the root of 1000 / 40, less pulled to the guess


def test_a_start_that_is_not_finite_is_an_error():
    trainee = Valley(best=5.0)
    trainee.factor = 100.0
    with pytest.raises(hdet.NotFiniteError, match="check the data and the model"):
        search(trainee)


def test_a_probe_is_all_that_is_scored_on():
    class Probed(Valley):
        def score(self, batches):
            assert batches == ["probe"]
            return super().score([0])

        def try_out(self, factors, turns, probe, told):
            assert probe == ["probe"]
            return super().try_out(factors, turns, [0, 1, 3], told)

    search(trainee := Probed(best=5.0), probe=["probe"])
    assert trainee.ramp_batches[0] == 0

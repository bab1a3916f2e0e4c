"""Population-based training by Ray Tune, in real processes; skipped where Ray is not installed."""

from __future__ import annotations

import random

import pytest

from hdet.lab.tasks.quadratic import Quadratic
from hdet.lab.tasks.task import load_task
from hdet.lab.train.runner import evaluate
from research.peers import METHODS

pytest.importorskip("ray", reason="ray is not installed; make test-ray runs them")
pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]  # Ray's own

FAILING = """
from hdet.lab.tasks.quadratic import Quadratic

class Failing(Quadratic):
    def train_batches(self, *, seed, replica=0, start=0):
        for step, batch in enumerate(super().train_batches(seed=seed, replica=replica, start=start), start):
            if replica == 1 and step == 15:
                raise RuntimeError("no more data")
            yield batch
"""

FILE = """
from hdet.lab.tasks.quadratic import Quadratic

class Mine(Quadratic):
    pass
"""


def test_members_train_and_the_worst_take_over_from_the_best():
    task = Quadratic(size=20)
    drawn = random.getstate()
    outcome = METHODS["pbt_ray"].train(task, 0.05, 60, 0, 4)
    assert random.getstate() == drawn
    assert outcome.final_loss < evaluate(task, task.build_model(0))["loss"]
    assert not outcome.diverged
    compact = METHODS["pbt"].train(task, 0.05, 60, 0, 4)
    assert outcome.final_loss == pytest.approx(compact.final_loss, rel=0.3)  # one rule, other draws
    # The first learning rates are the same, and every later one is a factor away from one of them.
    assert outcome.found_lr is not None
    assert 0.05 / 30 < outcome.found_lr < 0.05 * 30


def test_a_task_of_a_users_file_reaches_the_members(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    task = load_task(f"{tmp_path / 'mine.py'}:Mine", {"size": 10})
    outcome = METHODS["pbt_ray"].train(task, 0.05, 12, 0, 2)
    assert outcome.final_loss < evaluate(task, task.build_model(0))["loss"]


def test_a_start_that_destroys_all_members_has_diverged():
    assert METHODS["pbt_ray"].train(Quadratic(size=20), 1e8, 60, 0, 2, "sgd").diverged


def test_a_member_that_fails_ends_the_run_with_its_error(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    task = load_task(f"{tmp_path / 'failing.py'}:Failing", {"size": 10})
    with pytest.raises(Exception, match="no more data"):
        METHODS["pbt_ray"].train(task, 0.05, 60, 0, 3)

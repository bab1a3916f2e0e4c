"""The study of weight decay: runs are paired by seed, and a sweep goes on where its best is at an end."""

from __future__ import annotations

import pytest

from research.compare.ledger import Record
from research.explore import experiment
from research.explore.problems import GRID, PROBLEMS, names
from research.explore.summary import ratios, tables

NAME, LR = "digits_mlp", 0.01


def record(method: str, start: str, decay: float, seed: int, loss: float, **more) -> Record:
    given = {"problem": NAME, "method": method, "start": start, "lr": LR, "decay": decay, "seed": seed}
    result = {"final_loss": loss, "accuracy": 0.9, "scaled_loss": loss, "found_decay": decay}
    return given | result | {"found_lr": None} | more


def test_runs_are_compared_seed_by_seed():
    records = [record("fixed", "default", 0.03, seed, loss) for seed, loss in ((10, 1.0), (11, 4.0))]
    records += [
        record("explore", "default", 0.03, seed, loss) for seed, loss in ((11, 2.0), (10, 0.9), (12, 9.0))
    ]
    assert ratios(records, NAME, ("explore", "default"), ("fixed", "default")) == pytest.approx([0.9, 0.5])


def test_a_table_has_the_mean_of_a_problem_and_both_found_against_a_sweep_of_both():
    records = [record("fixed", start, decay, 10, 2.0) for start, decay in (("default", 0.03), ("best", 1.0))]
    records += [record("explore", start, 0.5, 10, 1.5, accuracy=0.92) for start in ("default", "best")]
    records += [record("joint best", "", 1.0, seed, loss) for seed, loss in ((10, 1.0), (11, 3.0))]
    records += [record("find and explore", "default", 0.03, 10, loss, lr=loss) for loss in (2.0, 2.4)]
    text = tables(records)
    row = "| explored from the default, over the default | 1 | 0.750 | 0.750 | 0.750 | - | - | - | - |"
    assert row in text
    assert "| LR found and decay explored, over a sweep of both | 1 | 1.100 | 1.100 | 1.100 | - |" in text
    assert "points: mean, least, most | 1 | +2.00 | +2.00 | +2.00 | - |" in text


def test_a_sweep_goes_on_where_its_best_is_at_an_end(tmp_path):
    ledger = experiment.open_ledger(tmp_path)
    problem = PROBLEMS[NAME]

    def sweep(best: float) -> list[float]:
        for spec in experiment._next_of_sweep(NAME, LR, ledger):
            strength = spec["decay"] * LR * problem.num_steps
            far = abs(strength - best)
            ledger.add(spec | {"final_loss": far, "accuracy": None, "scaled_loss": None, "found_decay": 0.0})
        return [spec["decay"] for spec in experiment._next_of_sweep(NAME, LR, ledger)]

    decays = sweep(best=0.0)  # the lowest is best
    assert decays == [problem.decay_at(GRID[0] / 3.3, LR)] * 2


def test_held_out_problems_are_there_and_no_name_is_in_both_splits():
    assert len(names("held out")) >= 10
    assert not set(names("held out")) & set(names("dev"))

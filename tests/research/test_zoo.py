"""The zoo: its problems, the strict sweep, and its tables."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from typer.testing import CliRunner

from research.__main__ import app
from research.zoo import other_sizes, sweep
from research.zoo.catalogue import names, problem_of
from research.zoo.experiment import open_ledger, run_zoo
from research.zoo.optimizers import MuonAndAdamW
from research.zoo.problems.physics import BurgersPinn
from research.zoo.summary import baseline_of, ratios, table
from research.zoo.sweep import WARMUPS, best_point, lr_at, next_points


def test_every_problem_is_dev_or_held_out():
    dev, held_out = names("dev"), names("held out")
    assert len(dev) >= 20 and len(held_out) >= 10
    assert set(names()) == {*dev, *held_out} and not {*dev} & {*held_out}


@pytest.mark.parametrize("best", [3e-5, 2e-3, 0.7])
def test_the_sweep_ends_at_the_best_point_of_the_lattice(best):
    def loss(point):
        warmup, place = point
        return 1 + (math.log(lr_at(place) / best)) ** 2 + (0.1 if warmup == WARMUPS[0] else 0.0)

    losses = {}
    while points := next_points(losses, 1e-3):
        assert not {*points} & {*losses}
        losses |= {point: loss(point) for point in points}
    warmup, place = best_point(losses)
    assert warmup == WARMUPS[1]
    assert abs(math.log(lr_at(place) / best)) <= math.log(10) / 16 + 1e-3
    assert {(warmup, place - 1), (warmup, place + 1)} <= {*losses}
    assert len(losses) <= 30


def test_a_sweep_in_which_nothing_trains_ends():
    losses = {}
    while points := next_points(losses, 1e-3):
        losses |= dict.fromkeys(points, math.inf)
    assert len(losses) < 30


def test_the_zoo_runs_resumes_and_has_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(BurgersPinn, "num_steps", 50)
    monkeypatch.setattr(sweep, "_HALF_WIDTH", 4)
    problem_of.cache_clear()
    settings = {"problems": ["burgers_pinn"], "seeds": (0,), "folder": tmp_path, "num_jobs": 1}
    stopped = iter([False] * 3)
    assert not run_zoo(methods=[], should_stop=lambda: next(stopped, True), **settings)
    assert len(open_ledger(tmp_path).records) == 3
    wanted = {"methods": ["hdet_find_on_top", "hdet_find", "plain_tail"], "starts": [1.0, 10.0]}
    assert run_zoo(**wanted, **settings)
    records = open_ledger(tmp_path).records
    before = (tmp_path / "zoo.jsonl").read_text()
    assert run_zoo(**wanted, **settings)
    assert (tmp_path / "zoo.jsonl").read_text() == before  # nothing is run twice

    # The best of the sweep is run again on fresh seeds, and those are the baseline.
    swept = [r for r in records if r["method"] == "sweep" and r["final_loss"] is not None]
    best = min(swept, key=lambda record: record["final_loss"])
    again = [r for r in records if r["method"] == "best again"]
    assert {(r["lr"], r["warmup"]) for r in again} == {(best["lr"], best["warmup"])}
    assert {10, 11} <= {r["seed"] for r in again} and not {r["seed"] for r in again} & {0}
    baseline = baseline_of(records, "burgers_pinn", (0,))
    assert baseline is not None
    assert baseline.loss == statistics.fmean(r["final_loss"] for r in again)

    (run,) = (r for r in records if (r["method"], r["start"], r["seed"]) == ("hdet_find_on_top", 1.0, 0))
    ours = ratios(records, "burgers_pinn", "hdet_find_on_top", 1.0, (0,))
    assert ours[0] == run["final_loss"] / baseline.loss
    (inside,) = (r for r in records if (r["method"], r["start"], r["seed"]) == ("hdet_find", 1.0, 0))
    assert run["found_lr"] == inside["found_lr"] and run["search_steps"] == inside["search_steps"] > 0
    assert run["final_loss"] != inside["final_loss"]  # one has fewer steps
    text = table(records, seeds=(0,))
    assert f"| {statistics.fmean(ours.values()):.3f} |" in text and "## Dev" in text
    found = CliRunner().invoke(app, ["zoo", "--table", "--out", str(tmp_path), "--seeds", "1"])
    assert found.exit_code == 0
    assert "burgers_pinn" in found.output
    problem_of.cache_clear()


def test_bad_arguments_of_the_command_are_named(tmp_path):
    found = CliRunner().invoke(app, ["zoo", "--problems", "nothing", "--out", str(tmp_path)])
    assert found.exit_code == 2
    assert "--problems must be one of" in " ".join(found.output.split())


def test_muon_and_adamw_step_each_their_own():
    matrix, bias = torch.nn.Parameter(torch.eye(4)), torch.nn.Parameter(torch.ones(4))
    groups = [{"params": [matrix], "uses_muon": True}, {"params": [bias], "uses_muon": False}]
    optimizer = MuonAndAdamW(groups, lr=0.1)
    (matrix.sum() + bias.sum()).backward()
    optimizer.step()
    assert not torch.equal(matrix, torch.eye(4)) and not torch.equal(bias, torch.ones(4))


def test_other_sizes_sweep_until_the_best_is_inside_and_then_search():
    records, best = [], -18
    for _ in range(4):
        wanted = other_sizes._next(records, "chars_gpt_on_1")
        specs = [s for s in wanted if not any(s.items() <= r.items() for r in records)]
        for spec in specs:
            loss = 1 + abs(round(8 * math.log10(spec["lr"])) - best)
            found = {"found_lr": 0.1, "search_steps": 250} if spec["start"] else {}
            records.append(spec | {"final_loss": loss, "found_lr": None, "search_steps": None} | found)
    swept = {r["lr"] for r in records if r["method"] == "sweep"}
    assert swept == {lr_at(place) for place in (-21, -18, -15, -12, -9, -6)}  # one more, below the five
    starts = {r["lr"] for r in records if r["start"] is not None}
    assert sorted(starts) == pytest.approx([0.1 * lr_at(best), 10 * lr_at(best)])
    assert "| 0.005623 | 0.1 | 0.1 | 9.000 | 9.000 | 25.0 % |" in other_sizes.table(records)

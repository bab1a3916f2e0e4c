"""The rows of the paper's Table 1: what each trains with, and what is shown of them."""

import dataclasses
import math

import pytest

from hdet.lab.ablation import (
    EQUAL,
    FLOOR,
    FULL,
    NOISE_SCALE,
    RESIDUAL,
    SPREAD,
    TABLE_1,
    Result,
    Training,
    ablate,
    decay_shape,
    method_settings,
    metric_names,
    replica_settings,
    train,
)
from hdet.lab.ablation_page import _charts, build_ablation, headline, remarks
from hdet.lab.stability import Stability
from hdet.lab.tasks.task import load_task

BASE = {"task": "quadratic", "task_options": {"size": 8}, "lr": 0.3, "steps": 60, "replicas": 2}
BASE |= {"optimizer": "sgd"}


def test_the_rows_leave_out_one_part_each():
    rows = {row.key: row.settings(500) for row in TABLE_1}
    full = rows[FULL]
    assert (full["spread"], full["noise_scale"], full["controllers"]) == (SPREAD, NOISE_SCALE, ["paper"])
    assert (full["floor"], full["controller_start"], full["sync_every"]) == (RESIDUAL, 100, 5)
    differs = {
        key: {name for name in full.keys() | settings if full.get(name) != settings.get(name)}
        for key, settings in rows.items()
    }
    assert differs["hdet_no_controller_checkpoint"] == {"controllers", "controller_start", "floor"}
    assert differs["hdet_no_warm_start"] == {"checkpoint", "noise_scale"}
    assert differs[EQUAL] == {"spread"}
    assert rows["warm_init_checkpoint"]["sync_every"] == 500
    assert [row.share for row in TABLE_1][:2] == [1 / 9, 1.0]
    assert sum(bool(row.paper) for row in TABLE_1) == 6
    # A row whose name says nothing of a checkpoint begins from new weights.
    assert {row.key for row in TABLE_1 if "checkpoint" in row.name} == {
        key for key, settings in rows.items() if "checkpoint" in settings
    }


def test_the_controllers_decay_ends_where_it_should():
    assert [decay_shape(t, steps=100) for t in (0, 10)] == [pytest.approx(0.04), 1.0]
    assert decay_shape(99, steps=100) == pytest.approx(0.22)
    assert decay_shape(99, steps=100, end=FLOOR) == pytest.approx(4e-6)
    # Sixteen rounds of five steps from 0.9 on: gamma = 1 - (0.22 / 0.9)^(1/16).
    assert decay_shape(20, steps=100) == pytest.approx(0.9 * (0.22 / 0.9) ** (1 / 16), rel=0.02)


def test_a_run_keeps_its_curves_and_repeats():
    task, base = load_task("quadratic", {"size": 8}), BASE | {"seed": 0}
    first, again = (train(task, base, method_settings(60)) for _ in range(2))
    assert (first.final_loss, first.losses, first.lrs) == (again.final_loss, again.losses, again.lrs)
    assert (len(first.losses), list(first.lrs)) == (60, ["lr"])
    assert first.lrs["lr"][0] == [1, 0.012]
    assert first.final_loss < first.untrained_loss
    plain = train(task, base, replica_settings(60))
    assert plain.final_loss != first.final_loss
    lost = train(task, base | {"lr": 1e9}, replica_settings(60))
    assert lost.is_crash


def test_all_rows_train_and_make_a_page(tmp_path):
    counts = []
    results = ablate(BASE, seeds=1, num_jobs=1, on_done=counts.append)
    assert counts == list(range(1, len(TABLE_1) + 1))
    assert [result.row for result in results] == list(TABLE_1)
    assert all(len(result.runs) == 1 and not result.runs[0].is_crash for result in results)
    text = build_ablation(results, BASE, tmp_path / "page.html").read_text()
    for words in ("Plain, checkpoint", "figure 1", "figure 2", "figure 3", "Cheng et al., 2026", "4.674 †"):
        assert words in text
    build_ablation([Result(row, 0.1) for row in TABLE_1], BASE, tmp_path / "page.html")  # stopped before any


def result(*losses, row=TABLE_1[0]):
    return Result(row, 0.1, [Training(x, 2.0, [1.0] * 20, {}, 1.0, seed=i) for i, x in enumerate(losses)])


def test_remarks_name_their_tests():
    def said(**losses):
        by_key = {"plain": "grid", "full": FULL, "equal": EQUAL}
        given = {by_key[key]: loss for key, loss in losses.items()}
        return remarks([result(*given.get(row.key, [1.0] * 5), row=row) for row in TABLE_1], "charlm")

    _, nothing_breaks, same, of_equal = said(full=[1.5, 0.5, 1.0, 1.5, 0.5])
    assert nothing_breaks.startswith("On charlm no run of this table crashed, ")
    begin = "“HDET (full), checkpoint” {} “{}”: "
    equal = "Equal replicas, checkpoint, same decay"
    numbers = "lower by 0.0000 ± 0.6208 (t, 5 seeds). They differ by checkpoint, decay, spread and "
    assert same.startswith(begin.format("cannot be told from", "Baseline-High") + numbers)
    assert of_equal.startswith(begin.format("cannot be told from", equal))
    assert said(full=[0.9] * 5)[-1].startswith(begin.format("does better than", equal))
    _, crashed, _ = said(plain=[9.0] * 5)
    numbers = "crashed 0/5 against 5/5 (Fisher p 0.0079)."
    assert crashed.startswith(begin.format("does better than", "Baseline-High") + numbers)
    assert (
        "crashed 1/5 against 0/5 (Fisher p 1); lower by"
        in said(equal=[1.0] * 5, full=[math.nan, 1, 1, 2, 1])[1]
    )
    assert len(remarks([Result(row, 0.1) for row in TABLE_1], "a")) == 1


def test_the_feed_has_columns_for_auc_and_ne():
    task = load_task("feed", {"num_users": 8, "num_items": 16, "batch_size": 2})
    run = train(task, BASE | {"task": "feed", "steps": 5, "seed": 0}, replica_settings(60))
    assert list(run.metrics) == metric_names([Result(TABLE_1[0], 0.1, [run])]) == ["auc", "ne"]
    done = Result(TABLE_1[0], 0.1, [Training(1.0, 2.0, [], {}, 1.0, {"auc": auc}) for auc in (0.7, 0.8)])
    assert (done.metric_text("auc"), done.metric_text("ne")) == ("0.7500 ± 0.0707", "-")


def test_the_figures_are_the_papers():
    full = train(load_task("quadratic", {"size": 8}), BASE | {"seed": 0}, method_settings(60))

    def fallen(row):
        if row.key == FULL:
            return Result(row, 0.3, [full])
        losses = [5.0] * 50 + [90.0 if row.key == "grid" else 1.0] * 50
        return Result(row, 0.3, [Training(1.0, 6.0, losses, {}, 1.0)])

    cycle, losses, rates = _charts([fallen(row) for row in TABLE_1])
    assert [chart.title[-10:] for chart in (cycle, losses, rates)] == [f"(figure {i})" for i in (1, 2, 3)]
    middle = [record for record in full.records if record.ends_round][5:7]
    assert cycle.traces[0]["x"] == [25, 30, 30, 30, 35, 35]
    rises = [100 * (record.multipliers["lr"][0] - 1) for record in middle]
    assert cycle.traces[0]["y"] == [0, rises[0], 0, 0, rises[1], 0] and abs(rises[0]) == pytest.approx(
        100 / 9
    )
    names = ["Baseline-Low", "Baseline-High", "Warm-Init, checkpoint", "HDET without warm start"]
    assert [trace["name"] for trace in losses.traces] == [*names, "HDET (full), checkpoint", "crashed"]
    assert (losses.traces[1]["y"][0], losses.traces[1]["y"][-1], len(losses.traces[1]["x"])) == (5, 90, 100)
    assert list(zip(losses.traces[-1]["x"], losses.traces[-1]["y"], strict=True)) == [(100, 90.0)]
    plan, replica, residual = rates.traces
    assert max(plan["y"]) == pytest.approx(0.3, rel=0.2) and replica["x"][-1] == 60
    first = full.records[0]
    assert replica["y"][4] == pytest.approx(first.values["lr"][0])
    assert residual["y"] == [pytest.approx(full.records[-1].base_trace["lr"][-1])] * 2


def test_the_headline_is_told_by_tests():
    def said(low, high, full):
        given = {"plain": low, "grid": high, FULL: full}
        return headline([result(*given.get(row.key, [1.0] * 5), row=row) for row in TABLE_1])

    held, why = said([1.0, 1.01, 1.02, 1.03, 1.04], [9.0] * 5, [0.5, 0.51, 0.52, 0.53, 0.54])
    assert held.endswith("and ends below Baseline-Low” holds here.")
    assert "5 of 5 runs of “Baseline-High” and 0 of 5 runs of “HDET (full), checkpoint” crashed." in why
    assert said([0.5] * 5, [9.0] * 5, [1.0] * 5)[0].endswith("does not hold here.")
    assert said([1.0] * 5, [1.0] * 5, [1.0] * 5)[0].endswith("cannot be told here.")
    assert headline([Result(row, 0.1) for row in TABLE_1]) == ("", "")


def test_a_run_that_has_learned_little_beside_baseline_low_crashed():
    run = Training(1.6, 2.0, [1.0] * 20, {}, 1.0)
    assert not run.is_crash and not dataclasses.replace(run, low_loss=1.3).is_crash
    lost = dataclasses.replace(run, low_loss=1.1).stability
    assert lost == Stability(has_spike=False, crash="less than half of what Baseline-Low has learned")


def test_losses_as_text():
    assert result(1.0).loss_text == "1.0000"
    assert result(1.0, 2.0).loss_text == "1.5000 ± 0.7071"
    assert result(1.0, 3.0).loss_text == "2.0000 ± 1.4142 †"
    assert (result(math.nan).loss_text, result().loss_text) == ("†", "-")

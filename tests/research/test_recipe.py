"""The study of the whole recipe: its problems, one run of each kind, and its tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hdet
from hdet.errors import HdetError
from research.__main__ import app
from research.compare.ledger import Record
from research.explore.data import friedman
from research.explore.models import mlp
from research.explore.problem import Problem
from research.recipe import data, models, sweep
from research.recipe.experiment import open_ledger, run_study, train
from research.recipe.problems import PROBLEMS, names
from research.recipe.summary import tables
from research.recipe.task import Judged
from research.zoo.catalogue import names as zoo_names

MADE_HERE = {
    "shapes_unet_batch_norm": partial(data.shapes, 60),
    "life_group_norm": partial(data.cells, 60),
    "attractor_residual_sgd": partial(data.attractor, 60),
    "bags_attention": partial(data.bags, 60),
    "symbols_lstm_clipped": partial(data.symbol_names, 60_000),
}


def test_splits_share_no_problem_and_no_family():
    families = {
        split: {PROBLEMS[n].family for n in names(split) if n in PROBLEMS} for split in ("dev", "held out")
    }
    assert not families["dev"] & families["held out"]
    assert not set(names("dev")) & set(names("held out"))
    assert not set(names("held out")) & set(zoo_names())


def test_the_held_out_problems_have_every_kind_that_was_promised():
    held_out = [PROBLEMS[name] for name in names("held out")]
    kinds = Counter(problem.optimizer for problem in held_out)
    assert len(held_out) >= 10
    assert kinds["sgd"] == 2
    assert kinds["muon"] == kinds["plain sgd"] == 1
    for split in ("dev", "held out"):
        clipped = [
            p for n in names(split) if (p := PROBLEMS.get(n)) and p.optimizer == "plain sgd" and p.clip_norm
        ]
        assert clipped
    assert PROBLEMS["diamonds_flow"].loss_of is models.flow_loss
    assert PROBLEMS["digits_diffusion"].loss_of is models.diffusion_loss


@pytest.mark.parametrize("name", MADE_HERE)
def test_training_probe_and_test_data_are_three_sets(name):
    parts = [{tuple(row.flatten().tolist()) for row in part[0]} for part in MADE_HERE[name]()]
    train, probe, test = parts
    assert not train & test
    assert not train & probe
    assert not probe & test


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in MADE_HERE])
def test_a_problem_whose_data_is_in_packages_has_a_loss_and_models_that_follow_from_the_seed(name, request):
    if not request.config.getoption("--download"):
        pytest.skip("data of the zoo is not here; make test-zoo runs them")
    problem = PROBLEMS[name]
    parts, model = problem.parts(), problem.model(0)
    for parameter, equal in zip(model.parameters(), problem.model(0).parameters(), strict=True):
        torch.testing.assert_close(parameter, equal, rtol=0, atol=0)
    problem.loss(model, next(problem.batches(0))).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)
    assert 0 < problem.measured(model, parts.test).loss < float("inf")


@pytest.mark.parametrize("name", ["shapes_unet_batch_norm", "life_group_norm", "attractor_residual_sgd"])
def test_a_problem_is_learned_and_judged(name):
    problem = PROBLEMS[name]
    model, parts = problem.model(0), MADE_HERE[name]()
    optimizer = problem.optimizer_of(model, problem.guess, problem.default_decay)
    few = (parts.train[0][:16], parts.train[1][:16])
    before = problem.measured(model, few)
    for _ in range(12):
        loss = problem.loss(model, few)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert problem.measured(model, few).loss < before.loss


def test_a_loss_that_draws_random_numbers_is_judged_alike_every_time():
    problem = PROBLEMS["diamonds_flow"]
    model, rows = models.ResidualMLP(8, 7), (torch.randn(40, 7), torch.zeros(40))
    assert problem.loss(model, rows).item() != problem.loss(model, rows).item()
    state = torch.get_rng_state()
    assert problem.measured(model, rows) == problem.measured(model, rows)
    assert torch.equal(torch.get_rng_state(), state)


def test_counts_that_are_foretold_have_no_deviance():
    logs = torch.tensor([0.0, 2.0])
    assert models.count_loss(lambda x: x, (logs, logs.exp())).item() == pytest.approx(0, abs=1e-6)
    half = models.count_loss(lambda x: x, (torch.zeros(1), torch.zeros(1)))
    assert half.item() == 1


def test_a_rotary_decoder_sees_the_past_alone_and_knows_where_it_is():
    torch.manual_seed(0)
    decoder = models.RotaryDecoder(16, 2, 1, 8)
    tokens = torch.randint(128, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 128
    torch.testing.assert_close(decoder(tokens)[:, :5], decoder(changed)[:, :5])
    swapped = tokens[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    assert not torch.allclose(decoder(tokens)[:, -1], decoder(swapped)[:, -1])


# --- the program ----------------------------------------------------------------------------------------

TINY = "friedman_mlp"  # the name of a dev problem, which stands for a smaller one here


@pytest.fixture
def tiny(monkeypatch):
    problem = Problem(
        "dev",
        "tiny",
        partial(friedman, 120),
        lambda _: mlp(10, 8, 1),
        num_steps=60,
        batch_size=8,
        kind="values",
    )
    monkeypatch.setitem(PROBLEMS, TINY, problem)
    monkeypatch.setattr(sweep, "_RATES", range(2, 5, 2))
    monkeypatch.setattr(sweep, "_STRENGTHS", range(0, 1))
    monkeypatch.setattr(sweep, "_MOST", 0)
    return problem


def spec(method: str, start: str = "", lr: float = 0.01, **more) -> Record:
    return {
        "problem": TINY,
        "method": method,
        "start": start,
        "lr": lr,
        "decay": None,
        "warmup": 0.4,
        "seed": 0,
    } | more


def test_the_program_sweeps_runs_the_winner_again_and_then_an_arm(tiny, tmp_path):
    arguments = [
        "recipe",
        "--problems",
        TINY,
        "--arms",
        "guess",
        "--seeds",
        "1",
        "--out",
        str(tmp_path),
        "--quiet",
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    records = open_ledger(tmp_path).records
    runs = [r for r in records if r["method"] == "sweep"]
    swept = {(r["lr"], r["warmup"]): r["final_loss"] for r in runs if r["seed"] == 0}
    best = sweep.baseline(records, TINY)
    assert best is not None
    lrs = [lr for lr, warmup in swept if warmup == 0.4]
    assert {0.003, 0.009} < set(lrs)  # both of the grid, and the half steps beside the better one
    assert len(lrs) == 4
    assert [warmup for _, warmup in swept].count(0.1) == 1
    means = [
        sum(r["final_loss"] for r in runs if (r["lr"], r["warmup"]) == (lr, warmup)) / 3
        for lr, _, warmup in sweep.finalists(records, TINY)
    ]
    assert len(means) == 3
    winner = sweep.finalists(records, TINY)[means.index(min(means))]
    assert sweep.winner(records, TINY) == winner
    assert best.lr == winner[0]
    again = [r for r in records if r["method"] == "best again"]
    assert [r["seed"] for r in again] == [10, 11, 12, 13]
    assert best.loss == pytest.approx(sum(r["final_loss"] for r in again) / 4)
    guesses = {r["start"]: r["lr"] for r in records if r["method"] == "guess"}
    assert guesses == pytest.approx(
        {"x0.1": best.lr / 10, "x1": best.lr, "x10": best.lr * 10, "1e-5": 1e-5, "1e-1": 0.1}
    )
    before = open_ledger(tmp_path).path.read_bytes()
    assert run_study(tmp_path, problems=[TINY], arms=["guess"], num_seeds=1)
    assert open_ledger(tmp_path).path.read_bytes() == before  # nothing is run twice


def test_a_sweep_whose_loss_is_never_finite_is_an_error(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "research.recipe.experiment.train", lambda s: s | {"final_loss": None, "metrics": {}, "seconds": 0}
    )
    with pytest.raises(HdetError, match="the sweep of 'friedman_mlp' must train at one place at least"):
        run_study(tmp_path, problems=[TINY])


@pytest.fixture
def tuned(tiny, monkeypatch):
    """Run an arm; give its calls of tune: what steers, who finds the learning rate, the steps, an epoch."""
    monkeypatch.setitem(PROBLEMS, TINY, replace(tiny, num_steps=300))
    calls, real = [], hdet.tune

    def tune(model, optimizer, batches, loss, **settings):
        given = settings.get("controllers")
        kinds = None if given is None else [type(one) for one in given]
        calls.append((kinds, settings.get("learning_rate", "search"), settings["total_steps"], len(batches)))
        return real(model, optimizer, batches, loss, **settings)

    monkeypatch.setattr(hdet, "tune", tune)

    def run(name):
        calls.clear()
        return train(spec(name, "x1")), list(calls)

    return run


def test_each_arm_has_the_parts_of_its_name(tuned):
    epoch = 120 // 8
    done, calls = tuned("everything")
    assert calls == [(None, "search", 300, epoch)]
    assert done["search_steps"] > 0
    assert {"weight_decay", "steered_lr", "loss"} == set(done["metrics"])
    for name, kept in (("without thermostat", hdet.HeldOutWeightDecay), ("without decay", hdet.Thermostat)):
        _, calls = tuned(name)
        assert calls == [(None, "search", 300, epoch), ([kept], "search", 300, epoch)]
    assert tuned("find")[1] == [([], "search", 300, epoch)]
    kept, calls = tuned("without search")
    assert calls == [(None, "keep", 300, epoch)]
    assert kept["found_lr"] is kept["search_steps"] is None


def test_the_search_is_taken_from_the_steps_within_them(tuned):
    inside, calls = tuned("everything, within")
    assert [steps for _, _, steps, _ in calls] == [300, 300 - tuned("everything")[0]["search_steps"]]
    assert inside["final_loss"] is not None


def test_statistics_of_batch_norm_are_taken_anew_before_a_model_is_judged(tiny):
    task = Judged(tiny, 0.0)
    model = nn.Sequential(nn.BatchNorm1d(10), nn.Linear(10, 1))
    model[0].running_var.fill_(1e6)
    task.metrics(model.eval(), task.evaluation_batches())
    assert model[0].running_var.max() < 2


def test_a_table_has_ratios_harms_answers_and_accuracies():
    lr = {"lr": 0.01, "decay": 0.3}
    records = [spec("sweep", **lr, final_loss=0.9, metrics={"loss": 0.9}, found_lr=None)]
    records += [
        spec("best again", **lr, seed=s, final_loss=loss, metrics={"accuracy": 0.9})
        for s, loss in ((10, 0.9), (11, 1.1))
    ]
    for method, losses in (("guess", (1.5, 1.0, 3.0)), ("everything", (1.2, 1.02, 1.1))):
        for start, loss in zip(("x0.1", "x1", "x10"), losses, strict=True):
            more = {
                "final_loss": loss,
                "metrics": {"accuracy": 0.89},
                "found_lr": 0.006 if loss < 1.1 else 0.004,
            }
            records.append(spec(method, start, **more, search_steps=60 if method == "everything" else None))
    text = tables(records)
    assert "| guess | 1 | 1.500 | 3.000 | 3.000 | - | - | 0 of 1 | 0 of 1 | - | -1.00 | -1.00 |" in text
    assert (
        "| everything | 1 | 1.100 | 1.200 | 1.200 | - | - | 1 of 1 | 0 of 1 | 33% | -1.00 | -1.00 |" in text
    )
    assert (
        "| friedman_mlp | MLP, regression | 0.01 | 0.3 | 1 | 10.0 % | 90.0 | 1.200 | 1.020 | 1.100 | - | - |"
        in text
    )
    assert "Held out" not in text

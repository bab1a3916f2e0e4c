"""The ablation: rules and verdicts against values by hand, what is resumed, what is shown."""

import json
import math

import pytest
import torch
import typer
from typer.testing import CliRunner

from hdet.errors import HdetError
from hdet.lab.ablation import FLOOR, TABLE_1, decay_shape, sync_every
from hdet.lab.intervals import sign_of
from hdet.lab.tasks.task import load_task
from hdet.lab.train.config import RunConfig
from hdet.lab.train.runner import evaluate
from hdet.lab.train.trainers import Trainer
from research.ablation import Ablation, ablate, claims, read_ablation, table, training
from research.ablation.figures import write_figures
from research.ablation.rows import ROWS
from research.ablation.rules import (
    Stability,
    choose_high,
    choose_safe,
    judge,
    next_points,
    window_means,
)
from research.ablation.summary import Chosen, Result, choose, rows_to_run
from research.ablation.training import thinned
from research.ablation.verdicts import compare_rows, together
from research.commands.ablate import ablate as command
from research.compare import ledger
from research.peers.base import Job

SMALL = {
    "task_options": {"size": 8},
    "optimizer": "sgd",
    "seeds": 2,
    "steps": 80,
    "replicas": 8,
    "num_jobs": 1,
}
CASE = {"task": "quadratic", "task_options": {"size": 8}, "optimizer": "sgd", "steps": 50, "replicas": 2}
STEADY, SPIKE = Stability(False, ""), Stability(True, "")


# --- rules ---------------------------------------------------------------------------------------


def verdict(means, *, warmup=10, final=0.5, untrained=10.0, **more):
    losses = [mean for mean in means for _ in range(10)]
    return judge(losses, num_warmup_steps=warmup, final_loss=final, untrained_loss=untrained, **more)


def test_a_spike_is_above_the_lowest_earlier_mean():
    assert verdict([2, 1, 1.29, 1]) == STEADY
    assert verdict([2, 1, 1.31, 1]) == SPIKE
    assert verdict([1, 2, 3, 1], warmup=40) == STEADY  # all of it in warmup
    assert verdict([1, 2, 1], warmup=20) == STEADY
    assert verdict([1, 1, 2, 1], warmup=20) == SPIKE  # by the lowest of the warmup
    assert verdict([2, 0.1, 0.19, 0.1]) == STEADY  # within 5 % of the first loss: chance
    assert verdict([2, 0.1, 0.21, 0.1]) == SPIKE
    assert verdict([0.1, 0.1, 0.19, 0.1]) == SPIKE
    assert verdict([0.1, 0.1, 0.19, 0.1], first_loss=2.0) == STEADY  # a checkpoint, whose first loss is small


def test_a_crash_is_a_spike_that_stays_or_a_loss_that_is_lost():
    assert verdict([2, 1, 1.5, 1.19]) == SPIKE
    assert verdict([2, 1, 1.5, 1.21]).crash == "a spike that it did not recover from"
    assert verdict([2, 1.0, 1.21]) == STEADY  # it has risen, but by no spike
    assert "untrained" in verdict([2, 1, 1], final=10.1).crash
    for crash in (verdict([2, math.inf]), verdict([2, 1], final=math.nan), verdict([])):
        assert crash == Stability(True, "a loss that is not finite")


def test_windows():
    assert window_means([1.0] * 10 + [2.0] * 15) == [1.0, 2.0]
    assert window_means([3.0, 5.0]) == [4.0]


def test_low_and_high():
    assert choose_high({1.0: [True, False], 2.0: [True, True], 3.0: [False, False]}) == 2.0
    assert choose_high({1.0: [True, False]}) is None
    assert choose_safe({3.0: [False], 1.0: [False], 2.0: [False]}) == 3.0
    assert choose_safe({1.0: [True], 2.0: [False]}) is None


def run(lr, seed, loss, *, row="grid", crashed=False, spike=False, settings=None, **more):
    return CASE | {
        "row": row,
        "lr": lr,
        "seed": seed,
        "settings": settings or {},
        "final_loss": loss,
        "untrained_loss": 10.0,
        "crashed": crashed,
        "crash": "why" * crashed,
        "has_spike": spike or crashed,
        "seconds": 1.0,
        "train_losses": [[1, 10.0], [50, loss]],
        "lrs": {},
        **more,
    }


# Best at 1, where the mean is 2; at 10 one seed has a spike; at 100 both end with less than half of the gain
# of 8 over the untrained model, which is 6 and more; at 1000 they are lost by their own losses.
GRID = [
    run(lr, seed, loss, spike=lr == 10 and seed == 1, crashed=lr == 1000)
    for lr, losses in ((0.1, (7.0, 7.0)), (1.0, (1.0, 3.0)), (10.0, (3.0, 4.0)), (100.0, (6.1, 9.0)))
    for seed, loss in enumerate(losses)
] + [run(1000.0, seed, None, crashed=True) for seed in (0, 1)]


def grid_of(records):
    grid = {}
    for record in records:
        grid.setdefault(record["lr"], {})[record["seed"]] = record
    return grid


def test_the_grid_chooses():
    chosen = Chosen(low=0.1111, high=100.0, best=1.0, breaks=True)
    assert choose(grid_of(GRID)) == chosen  # 0.1 has a small gain too, but below the best that is no crash
    assert choose(grid_of(GRID[:6])) == Chosen(low=0.1111, high=10.0, best=1.0, breaks=False)
    assert choose(grid_of([run(1.0, 0, None, crashed=True)])) is None
    assert choose({}) is None


def test_the_grid_grows_where_it_must():
    start = next_points({}, {}, {}, 0.1)
    assert start == list(range(-8, 1))
    fine = {point: [False] for point in start}
    losses = {point: abs(point + 4.0) for point in start}
    assert next_points(losses, fine, fine, 0.1) == [1, 2]  # nothing breaks
    broken = fine | {0: [True]}
    assert next_points(losses, broken, broken, 0.1) == []
    assert next_points(losses, broken, broken | {-8: [True]}, 0.1) == [-10, -9]
    assert next_points({p: float(p) for p in start}, broken, broken, 0.1) == [-10, -9]
    wide = {point: [False] for point in range(-8, 7)}
    assert next_points({p: abs(p + 4.0) for p in wide}, wide, wide, 0.1) == []  # far enough


# --- rows ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the controller has nothing to compare")
@pytest.mark.parametrize("key", ["hdet", "hdet_floor"])
def test_the_decay_is_the_controllers_own(key):
    steps, task = 100, load_task("quadratic", {"size": 8})
    settings = next(row for row in ROWS if row.key == key).settings(steps)
    # Without a spread there is no signal: what is left of the controller is its decay.
    config = RunConfig(
        task="quadratic", lr=0.01, steps=steps, replicas=2, find=False, **settings | {"spread": 0.0}
    )
    trainer = Trainer(task, config, None, "cpu")
    for step in range(steps):
        (base,) = {float(value) for name, value in trainer.engine.base.items() if name.startswith("lr")}
        assert base == pytest.approx(0.01 * decay_shape(step, steps=steps, end=settings["floor"]))
        trainer.step()


def test_a_row_of_the_lab_is_the_same_here():
    """One meaning of each name: ``hdet ablate`` and this table train the same where they say the same."""
    here = {row.name: row for row in ROWS if row.at in ("low", "high")}
    shared = [row for row in TABLE_1 if row.name in here]
    assert len(shared) == 5
    for row in shared:
        assert here[row.name].key == row.key
        if row.key not in ("plain", "grid"):  # trained plainly here, which adds up to the same
            assert here[row.name].settings(300) == row.settings(300)
    keys = {(row.name, row.key) for row in (*ROWS, *TABLE_1)}
    assert len({name for name, _ in keys}) == len(keys)


def test_where_the_decays_end():
    assert decay_shape(99, steps=100, end=FLOOR) == pytest.approx(4e-6)


def test_rows_at_high_are_left_out_where_nothing_breaks():
    rows = rows_to_run(Chosen(low=0.1, high=1.0, best=0.5, breaks=True))
    assert [row.name for row, _ in rows[:4]] == ["Baseline-Low", "Baseline-High", "Warm-Init", "HDET (full)"]
    assert [lr for _, lr in rows[:4]] == [0.1, 1.0, 1.0, 1.0]
    fewer = rows_to_run(Chosen(low=0.1, high=1.0, best=0.5, breaks=False))
    assert fewer == [(row, lr) for row, lr in rows if row.at != "high"]
    assert len({(row.key, row.at) for row in ROWS}) == len(ROWS)


def test_a_checkpoint_is_where_a_run_begins():
    base = CASE | {"lr": 0.01, "seed": 0, "steps": 60}
    warm = {"spread": 0.0, "controllers": (), "sync_every": 5, "checkpoint": 1.0}
    cold = {name: value for name, value in warm.items() if name != "checkpoint"}
    first, again = (training.train(base | {"row": "x", "settings": warm}) for _ in range(2))
    new = training.train(base | {"row": "x", "settings": cold})
    assert first["final_loss"] == again["final_loss"]
    assert first["untrained_loss"] == new["untrained_loss"]  # of new weights, for all rows alike
    assert first["train_losses"][0][1] < 0.5 * new["train_losses"][0][1]
    assert first["final_loss"] < new["final_loss"]


def test_a_plain_run_is_a_run_of_equal_replicas():
    base = CASE | {"lr": 0.01, "seed": 0}
    plain = training.train(base | {"row": "grid", "settings": {}})
    local = {"spread": 0.0, "controllers": (), "probe": False, "sync_every": 5}
    equal = training.train(base | {"row": "other", "settings": local})
    assert equal["final_loss"] == pytest.approx(plain["final_loss"], rel=1e-4)
    assert (plain["num_steps_done"], len(plain["train_losses"])) == (50, 50)


def test_averages_of_the_weights():
    steps = CASE["steps"]
    job = Job(
        task=load_task("quadratic", {"size": 8}),
        start_lr=0.01,
        steps=steps,
        seed=0,
        num_replicas=2,
        optimizer_kind="sgd",
    )
    weights = []
    original = torch.optim.SGD.step

    def step(self, *args):
        result = original(self, *args)
        weights.append(torch.cat([p.detach().flatten() for p in self.param_groups[0]["params"]]))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", step)
        swa = training._train_plain(job, {"average": "swa", "share": 0.2})
    model = job.build_model()
    torch.nn.utils.vector_to_parameters(torch.stack(weights[-10:]).mean(dim=0), model.parameters())
    assert swa.final_loss == pytest.approx(evaluate(job.task, model)["loss"])


def test_curves_are_thinned():
    assert thinned([]) == []
    assert len(thinned([1.0] * 1001)) == 91
    assert thinned([1.0, math.nan]) == [[1, 1.0], [2, None]]


# --- verdicts ------------------------------------------------------------------------------------


def result(losses, crashed=(), key="hdet"):
    row = next(row for row in ROWS if row.key == key)
    records = {s: run(1.0, s, x, crashed=s in crashed) for s, x in enumerate(losses)}
    return Result(row, 1.0, records)


def test_the_sign_of_a_mean():
    assert sign_of([1.0])[0] == 0
    assert sign_of([1.0, 1.0]) == (1, 1.0, 0.0)
    assert sign_of([0.0, 0.0]) == (0, 0.0, 0.0)
    sign, mean, half = sign_of([-1.0, -2.0, -3.0, -4.0])  # deviation 1.291, half of it, times 3.182
    assert (sign, mean) == (-1, -2.5)
    assert half == pytest.approx(2.054, abs=1e-3)
    _, _, half = sign_of([1.0, -1.0] * 10)  # deviation 1.02598, over the root of 20, times 2.0930
    assert half == pytest.approx(0.48017, abs=1e-5)


def test_losses_are_compared_seed_by_seed():
    # The seeds differ by more than the rows do, but each pair by 0.1.
    assert compare_rows(result([1.0, 2.0, 3.0]), result([1.1, 2.1, 3.1]))[0] == "holds"
    assert compare_rows(result([1.1, 2.1, 3.1]), result([1.0, 2.0, 3.0]))[0] == "does not hold"
    assert compare_rows(result([1.0, 2.0, 3.0]), result([1.1, 1.9, 3.1]))[0] == "cannot be told"
    assert compare_rows(result([]), result([1.0]))[0] == "not run"
    assert compare_rows(result([1.0]), result([2.0, 3.0]))[0] == "cannot be told"  # one seed has both


def test_crashes_come_before_losses():
    good, one, most = result([3.0] * 8), result([1.0] * 8, {0}), result([1.0] * 8, range(5))
    assert compare_rows(most, good) == (
        "does not hold",
        "HDET (full) 1.0000 ± 0.0000 † 5/8 crashed against HDET (full) 3.0000 ± 0.0000: "
        "crashed 5/8 against 0/8 (Fisher p 0.026)",
    )
    assert compare_rows(good, most)[0] == "holds"
    assert compare_rows(one, good)[0] == "holds"  # one crash of eight is no difference, but the loss is
    few = result([1.0] * 3), result([1.5, 2.0, 2.5], {0, 1, 2})
    assert "crashed 0/3 against 3/3 (Fisher p 0.1); lower by 1.0000 ± 1.2421" in compare_rows(*few)[1]
    lost = result([1.0, None], {1})
    assert compare_rows(lost, lost)[1].endswith("(Fisher p 1); lower by 0.0000 (one seed)")


def rows_at(lr, at, losses, **more):
    return [
        run(lr, seed, loss, row=row.key, settings=row.settings(50), **more)
        for row in ROWS
        if row.at == at and row.key in losses
        for seed, loss in enumerate(losses[row.key])
    ]


def full_records(high_losses, lrs=None):
    """The grid, whose High is 100 and best 1, and rows at them and at Low."""
    names = ("hdet_no_controller", "hdet_no_warm_start", "equal", "plain_decay", "local_sgd", "warm_init")
    losses = dict.fromkeys(names, (2.0, 2.5)) | {"hdet": high_losses}
    records = GRID + rows_at(0.1111, "low", {"plain": (5.0, 6.0)}) + rows_at(100.0, "high", losses)
    for record in records:
        if record["row"] == "hdet" and lrs:
            record["lrs"] = lrs
    return records


def test_the_claims():
    lrs = {"lr.transformer": [[5, 1.0], [50, 0.1]], "lr.no_decay": [[5, 1.0], [50, 0.2]]}
    (case,) = Ablation(full_records((1.5, 2.0), lrs)).cases
    verdicts = {claim.number: claim for claim in claims(case)}
    assert {number: claim.verdict for number, claim in verdicts.items() if "'" not in number} == {
        "1a": "cannot be told",  # two seeds of two are chance
        "1b": "not run",
        "2a": "holds",
        "2b": "cannot be told",  # lower by -0.5 and 1
        "3a": "holds",
        "3b": "holds",
        "3c": "holds",
        "3d": "holds",
        "3f": "not run",
        "4": "holds",
    }
    assert "crashed: HDET (full) 0/2, plain 2/2 (p 0.33), Equal replicas" in verdicts["1a"].why
    assert "no_decay" in verdicts["4"].why
    assert all(claim.verdict == "not run" for number, claim in verdicts.items() if "'" in number)

    more = [run(100.0, seed, 9.0) for seed in range(2, 6)]  # dead, if not by any spike
    for losses, verdict_of_six in (((2.0,) * 6, "holds"), ((9.0,) * 6, "does not hold")):
        cases = Ablation(full_records(losses) + more).cases
        assert claims(cases[0])[0].verdict == verdict_of_six
    assert together(cases)[0] == "HDET (full) 6 of 6, plain training 6 of 6 (p 1)"
    (case,) = Ablation(full_records((2.0, 9.0))).cases
    assert claims(case)[0].verdict == "cannot be told"
    (case,) = Ablation(GRID[:6]).cases
    assert claims(case)[0].why == "no LR up to 10 breaks a plain run"
    assert {claim.number for claim in claims(case)} >= {"1a", "1b", "2a'", "2c'", "3g'", "4'"}
    assert "2a" not in {claim.number for claim in claims(case)}


def test_the_table():
    text = table(Ablation(full_records((1.5, 9.0))))
    lines = text.splitlines()
    assert lines[0] == "### quadratic, size=8, sgd: 50 steps, 2 replicas, 2 seeds"
    assert lines[2] == "Low 0.1111, High 100, best plain LR 1; T = 5, controller from step 10."
    assert "| **Baseline-Low** | plain | 0.1111 | 5.5000 ± 0.7071 | 1.0 |" in lines
    assert "| **Baseline-High** | plain | 100 | 7.5500 ± 2.0506 † 2/2 crashed | 1.0 |" in lines
    full = "spread, noise, and a decay to 22 % of the peak | 100 | 5.2500 ± 5.3033 † 1/2 crashed | 1.0 |"
    assert f"| **HDET (full)** | {full}" in lines
    assert "| HDET (full), floor-matching | the decay ends at OneCycleLR's floor | 100 | - | - |" in lines
    assert "The grid has no result yet." in table(Ablation([run(1.0, 0, None, crashed=True)]))
    assert table(Ablation([])).startswith("Held-out loss")


# --- all of it -----------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    """What was run."""
    specs = []
    original = ledger.train_one
    monkeypatch.setattr(ledger, "train_one", lambda spec, train: specs.append(spec) or original(spec, train))
    return specs


def test_an_ablation_from_end_to_end_goes_on_where_it_was(tmp_path, made):
    stopped = ablate("quadratic", **SMALL, folder=tmp_path, should_stop=lambda: len(made) >= 5)
    assert (stopped.is_complete, len(stopped.records)) == (False, 5)

    progress = []
    whole = ablate("quadratic", **SMALL, folder=tmp_path, on_done=lambda *pair: progress.append(pair))
    assert whole.is_complete
    assert progress[0][0] == 5
    assert progress[-1][0] == progress[-1][1] == len(whole.records)
    lines = [json.loads(line) for line in (tmp_path / "ablation.jsonl").read_text().splitlines()]
    assert len(lines) == len(made) == len(whole.records)
    assert all(len(line["train_losses"]) <= 100 for line in lines)
    assert lines[0]["command"].startswith("python -m research ablate --seeds 2 --task quadratic --steps 80")

    (case,) = whole.cases
    assert case.chosen is not None
    assert case.chosen.breaks
    assert all(len(r.runs) == 2 for r in case.results)
    assert case.result("grid", "high").num_crashed == 2
    assert case.result("plain", "low").num_crashed == 0
    (curve,) = case.result("hdet", "best").runs[0]["lrs"].values()
    assert curve[0][0] == 1
    assert curve[-1][1] == pytest.approx(0.22 * case.chosen.best, rel=0.5)  # decayed
    assert {claim.number for claim in claims(case)} >= {"1a", "1b", "2a", "2b", "3a", "3b", "4"}

    count = len(made)
    assert ablate("quadratic", **SMALL, folder=tmp_path).cases == whole.cases
    assert read_ablation([tmp_path]).cases == whole.cases
    assert len(made) == count
    decisive = SMALL | {"decisive_seeds": 3, "should_stop": lambda: len(made) >= count + 10}
    ablate("quadratic", **decisive, folder=tmp_path)
    assert [(spec["row"], spec["seed"]) for spec in made[count:]] == [
        ("grid", 2),  # at High
        ("hdet", 2),
        ("equal", 2),
        ("plain_decay", 2),
        ("local_sgd", 2),
        ("hdet_local", 2),
        ("grid", 2),  # at the best
        ("hdet", 2),
        ("equal", 2),
        ("plain_decay", 2),
    ]
    (case,) = read_ablation([tmp_path]).cases
    assert case.title.endswith("2 to 3 seeds")
    assert (case.chosen, case.seeds) == (whole.cases[0].chosen, [0, 1])  # the grid is as it was
    assert len(case.result("grid", "best").runs) == len(case.result("equal", "best").runs) == 3

    count = len(made)
    more = SMALL | {"seeds": 3, "should_stop": lambda: len(made) > count}
    ablate("quadratic", **more, folder=tmp_path)
    assert [spec["seed"] for spec in made[count:]] == [2]  # the other two are there

    figures = write_figures(whole, tmp_path)
    assert [f.read_bytes()[1:4] for f in figures] == [b"PNG", b"PNG"]


def test_a_grid_can_be_given(tmp_path, made):
    given = ablate("quadratic", **SMALL | {"seeds": 1}, lrs=(0.1, 0.3), folder=tmp_path)
    (case,) = given.cases
    assert list(case.grid) == [0.1, 0.3]
    assert not any(result.row.at == "high" for result in case.results)
    assert "--lrs 0.1,0.3 --task quadratic" in given.records[0]["command"]


def test_the_command_builds_the_table_again(tmp_path):
    app = typer.Typer()
    app.command()(command)
    with (tmp_path / "ablation.jsonl").open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in full_records((1.5, 2.0)))
    done = CliRunner().invoke(app, ["--table", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["cases"][0]["chosen"]["high"] == 100
    assert data["cases"][0]["claims"][4]["verdict"] == "holds"
    assert {p.name for p in tmp_path.iterdir()} == {
        "ablation.jsonl",
        "ablation.md",
        "loss-quadratic-sgd-50.png",
        "lr-quadratic-sgd-50.png",
    }
    for arguments, message in (
        (["--table"], "--table must be followed by a folder"),
        (["--table", str(tmp_path / "none")], "it has no ablation.jsonl"),
        ([str(tmp_path)], "folders go with --table"),
        (["--task", "quadratic", "--steps", "20", "--out", str(tmp_path)], "steps must be an integer of at"),
    ):
        done = CliRunner().invoke(app, arguments)
        assert (done.exit_code, message in done.stderr) == (2, True), done.output


def test_without_matplotlib_there_is_the_table(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(HdetError, match="pip install"):
        write_figures(Ablation(full_records((1.5, 2.0))), tmp_path)


def test_rounds_fit_the_length():
    assert [sync_every(steps) for steps in (50, 500, 1000)] == [5, 5, 10]

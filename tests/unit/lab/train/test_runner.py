"""A run leaves a complete folder, stops and resumes to the bit, and says so when it fails."""

import dataclasses
import json
import math

import pytest
import torch

import hdet
from hdet.lab.sweep import log_grid, sweep
from hdet.lab.tasks.task import load_task
from hdet.lab.train.config import RunConfig
from hdet.lab.train.folder import RunFolder
from hdet.lab.train.runner import run, task_facts
from hdet.records import Records
from tests.helpers.replicas import run_replicas

BASE = RunConfig(
    task="quadratic",
    task_options={"size": 10},
    lr=0.05,
    steps=60,
    replicas=4,
    optimizer="sgd",
    sync_every=10,
    controllers=("log",),
    find=False,
)


def start(tmp_path, name="run", config=BASE, **arguments):
    folder = RunFolder.create(tmp_path / name, config, {})
    return run(config, folder, **arguments), folder


def test_a_run_leaves_everything_behind(tmp_path):
    seen = Records()
    result, folder = start(tmp_path, sinks=[seen])
    assert result.status == "finished"
    assert (result.steps, result.base_lr) == (60, 0.05)
    assert json.loads(folder.result.read_text()) == result.to_json()
    assert len(seen) == len(hdet.read_records(folder.records)) == 6
    evaluations = [json.loads(line) for line in folder.evaluations.read_text().splitlines()]
    assert [e["step"] for e in evaluations] == list(range(0, 61, 10))
    assert evaluations[-1]["loss"] == result.final_loss < evaluations[0]["loss"]
    assert folder.read_config() == dataclasses.replace(BASE, name="run")
    assert {"command", "hdet", "torch", "python"} <= set(json.loads(folder.environment.read_text()))
    correction = hdet.read_records(folder.records)[-1].correction["lr"]
    assert result.found_lr == pytest.approx(0.05 * correction)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"spread": 0.0, "controllers": ()},
        {"spread": 0.0, "controllers": (), "noise_scale": 0.01, "optimizer": "adamw"},
        {"gradients": "local", "noise_scale": 0.01},
        {"optimizer": "adamw", "explore": {"weight_decay": 0.5}, "weight_decay": 0.1, "per_group": True},
        {"controllers": ("paper",)},
        RunConfig.of_paper(60) | {"sync_every": 10},
        {
            "spread": 0.0,
            "replicas": 8,
            "optimizer": "adamw",
            "find": True,
            "steps": 200,
            "controllers": ("guard",),
        },
    ],
    ids=str,
)
def test_a_stopped_run_resumes_to_the_bit(tmp_path, changes):
    config = dataclasses.replace(BASE, **changes)
    whole, _ = start(tmp_path, "whole", config)
    calls, num_looks = [], 2
    stopped, folder = start(
        tmp_path, "parts", config, should_stop=lambda: len(calls) == num_looks or bool(calls.append(1))
    )
    assert (stopped.status, stopped.steps) == ("stopped", 10 * num_looks + 10)
    resumed = run(config, folder, resume=True)
    assert resumed.status == "finished"
    assert resumed.final_loss == whole.final_loss
    assert resumed.found_lr == pytest.approx(whole.found_lr, rel=1e-12)
    one, two = (hdet.read_records(tmp_path / n / "records.jsonl")[-1] for n in ("whole", "parts"))
    assert one.losses == two.losses


def test_equal_replicas_are_computed_as_one(tmp_path):
    # Spread 0 trains one model on all batches; it must be what four equal replicas would be.
    plain = dataclasses.replace(BASE, spread=0.0, controllers=())
    joined, folder = start(tmp_path, "joined", plain)
    assert hdet.read_records(folder.records)[-1].num_replicas == 4
    tiny, _ = start(tmp_path, "tiny", dataclasses.replace(plain, spread=1e-9))
    assert joined.final_loss == pytest.approx(tiny.final_loss, rel=1e-5)


def stop_after(num_looks):
    calls = []
    return lambda: len(calls) == num_looks or bool(calls.append(1))


def checkpoints(folder):
    return {file.name: file.read_bytes() for file in folder.checkpoints.iterdir()}


def test_a_run_that_fails_keeps_the_last_good_checkpoint(tmp_path):
    result, folder = start(tmp_path, config=dataclasses.replace(BASE, lr=1e9))
    assert result.status == "failed"
    assert result.reason
    assert result.final_loss is None
    assert not folder.has_checkpoint
    # The same learning rate from a good checkpoint on: it stays what it was.
    _, folder = start(tmp_path, "good", should_stop=stop_after(2))
    good = folder.open_checkpoint()
    state = good.states["trainer"]
    state["param_groups"][0] |= {"lr": 1e9, "initial_lr": 1e9}
    state["engine"]["scheduler"]["base_lrs"] = [1e9]
    good.path.unlink()
    hdet.save_checkpoint(folder.checkpoints, step=30, trainer=Saved(state), **good.values)
    before = checkpoints(folder)
    assert run(BASE, folder, resume=True).status == "failed"
    assert checkpoints(folder) == before


class Saved:
    """A part with a state of our choice."""

    def __init__(self, state):
        self.state_dict = lambda: state

    def load_state_dict(self, state):
        raise NotImplementedError


def test_a_run_that_ends_above_its_first_loss_has_diverged(tmp_path):
    config = dataclasses.replace(BASE, controllers=(), anneal="none", warmup=0.0, lr=2.3, momentum=0.0)
    result, folder = start(tmp_path, config=config)
    evaluations = [json.loads(line)["loss"] for line in folder.evaluations.read_text().splitlines()]
    assert 1.05 * evaluations[0] < evaluations[-1] < math.inf
    assert (result.status, result.final_loss) == ("diverged", evaluations[-1])
    assert f"was {evaluations[0]:.4g} at first and is {evaluations[-1]:.4g} now" in result.reason
    # A run in two parts remembers where it began.
    start(tmp_path, "parts", config, should_stop=stop_after(2))
    assert run(config, RunFolder(tmp_path / "parts"), resume=True).status == "diverged"


@pytest.mark.parametrize("damage", [b"", b"something else", None], ids=["empty", "foreign", "cut"])
def test_a_broken_checkpoint_gives_way_to_the_one_before(tmp_path, damage):
    whole, _ = start(tmp_path, "whole")
    _, folder = start(tmp_path, should_stop=stop_after(2))
    newest = folder.checkpoints / "step-000030.pt"
    newest.write_bytes(newest.read_bytes()[:1000] if damage is None else damage)
    notes = []
    resumed = run(BASE, folder, resume=True, on_note=notes.append)
    assert resumed.final_loss == whole.final_loss
    assert len(notes) == 1
    assert "step-000030.pt is broken" in notes[0]
    assert notes[0].endswith("going on from step-000020.pt")


def test_a_run_does_not_go_on_with_other_settings(tmp_path):
    _, folder = start(tmp_path, should_stop=stop_after(2))
    before = checkpoints(folder)
    changes = {"optimizer": "adamw", "task_options": {"size": 12}, "steps": 80}
    with pytest.raises(ValueError, match=r"must have the settings that the run began with") as error:
        run(dataclasses.replace(BASE, **changes), folder, resume=True)
    for words in (
        "task_options ({'size': 10} before, {'size': 12} now), steps (60 before, 80 now)",
        "optimizer ('sgd' before, 'adamw' now)",
    ):
        assert words in str(error.value)
    assert checkpoints(folder) == before
    notes = []
    fewer = dataclasses.replace(BASE, replicas=2, name="other", evaluate_every=20)
    assert run(fewer, folder, resume=True, on_note=notes.append).status == "finished"
    assert notes == ["4 replicas before, 2 now"]


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    _, folder = start(tmp_path, should_stop=stop_after(2))
    hdet.save_checkpoint(folder.checkpoints, step=40, model=torch.nn.Linear(1, 1))
    with pytest.raises(hdet.CheckpointError, match=r"step-000040.pt must be a checkpoint of 'hdet run', but"):
        run(BASE, folder, resume=True)


def test_the_settings_of_a_task_are_plain():
    facts = task_facts(load_task("digits"))
    assert facts["task_settings"] == {"model": "mlp", "width": 32, "dropout": 0.0, "batch_size": 8}


def test_a_folder_is_never_overwritten_by_accident(tmp_path):
    start(tmp_path)
    with pytest.raises(ValueError, match=r"out must be a folder without a run, got .*hdet resume"):
        start(tmp_path)


def test_errors_name_the_setting():
    for changes, message in (
        ({"lr": 0.0}, "lr must be a number above 0, got 0.0"),
        ({"engine": "cloud"}, "engine must be one of"),
        ({"explore": {"colour": 0.5}}, "explore must be one of"),
        ({"gradients": "own"}, "gradients must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(BASE, **changes)


def _rank(rank, folder):
    config = dataclasses.replace(BASE, engine="torchrun", replicas=2)
    if rank == 0:
        RunFolder.create(folder, config, {})
    torch.distributed.barrier()
    calls = []
    stop = run(config, RunFolder(folder), should_stop=lambda: len(calls) == 2 or bool(calls.append(1)))
    torch.distributed.barrier()
    go_on = run(config, RunFolder(folder), resume=True)
    return stop.status, stop.steps, go_on.final_loss


def test_ranks_end_where_virtual_replicas_do_and_stop_together(tmp_path):
    virtual, _ = start(tmp_path, "virtual", dataclasses.replace(BASE, replicas=2))
    results = run_replicas(_rank, 2, tmp_path / "ranks")
    assert results[0] == results[1]
    assert results[0][:2] == ("stopped", 30)
    assert results[0][2] == pytest.approx(virtual.final_loss, rel=1e-5)


def test_sweep_marks_the_best_and_does_not_run_points_again(tmp_path):
    config = dataclasses.replace(BASE, spread=0.0, controllers=())
    grid = log_grid(0.01, 1, 1)
    outcome = sweep(config, grid, tmp_path, num_jobs=2)
    assert [p["base_lr"] for p in outcome.points] == grid
    assert outcome.best is not None
    assert outcome.best["final_loss"] == min(p["final_loss"] for p in outcome.points if p["final_loss"])
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("result.json")}
    finer = sweep(config, log_grid(0.01, 1, 2), tmp_path, num_jobs=2)
    assert len(finer.points) == 5
    assert all(p.stat().st_mtime_ns == t for p, t in before.items())
    with pytest.raises(ValueError, match=r"has another steps"):
        sweep(dataclasses.replace(config, steps=50), grid, tmp_path)


def test_a_sweep_that_is_stopped_goes_on(tmp_path):
    config = dataclasses.replace(BASE, spread=0.0, controllers=(), steps=500)
    grid, done = [0.01 + i / 1000 for i in range(6)], []
    part = sweep(config, grid, tmp_path, num_jobs=1, on_done=done.append, should_stop=lambda: done[-1] >= 1)
    assert not part.is_complete and len(part.points) < 6
    whole = sweep(config, grid, tmp_path, num_jobs=1)
    assert whole.is_complete and all(math.isfinite(point["final_loss"]) for point in whole.points)


def test_dropout_repeats_itself_and_resumes(tmp_path):
    options = {"dropout": 0.2, "width": 16, "batch_size": 2}
    config = dataclasses.replace(BASE, task="charlm", task_options=options, steps=20, replicas=2)
    before = torch.get_rng_state()
    whole, _ = start(tmp_path, "whole", config)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)  # somebody else's draws do not matter
    again, _ = start(tmp_path, "again", config)
    other, _ = start(tmp_path, "other", dataclasses.replace(config, seed=1))
    assert whole.final_loss == again.final_loss != other.final_loss
    seen = hdet.Records()
    stopped, folder = start(tmp_path, "stopped", config, should_stop=lambda: bool(seen), sinks=[seen])
    assert stopped.status == "stopped"
    assert run(config, folder, resume=True).final_loss == whole.final_loss


def test_the_papers_controller_begins_after_the_warm_up() -> None:
    """It holds the learning rate from where it begins, which would never rise otherwise."""
    settings = {"task": "quadratic", "steps": 200, "lr": 0.1}
    assert RunConfig(**settings, controllers=("paper",)).controller_start == 20
    assert RunConfig(**settings, controllers=("paper",), controller_start=0).controller_start == 0
    assert RunConfig(**settings, controllers=("log",)).controller_start == 0


@pytest.mark.filterwarnings("ignore:the controller has nothing to compare")
def test_the_floor_of_the_papers_controller_follows_the_peak_that_was_found(tmp_path) -> None:
    settings = {"task": "quadratic", "steps": 200, "sync_every": 10, "replicas": 2}
    config = RunConfig(**settings, lr=1e-3, controllers=("paper",), spread=0.0)  # so only its decay acts
    _, folder = start(tmp_path, config=config)
    search, *rounds = hdet.read_records(folder.records)
    assert search.search is not None and search.search.found > 5 * config.lr
    floor = search.search.found / (25 * 1e4)
    assert 0.4 * floor < rounds[-1].base["lr"] < 1.1 * floor, "within one round of its decay"

"""The command line as its users meet it: exit codes, what is on stdout and what on stderr, signals."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hdet.lab.cli.app import app
from hdet.lab.page.read_runs import read_run
from hdet.lab.page.sentences import run_tiles

QUICK = ["--task", "quadratic", "--steps", "60", "--sync-every", "10", "--replicas", "2", "--lr", "0.05"]

HELD_OUT = "held_out_weight_decay"


@pytest.fixture
def hdet(tmp_path, monkeypatch):
    """Runs a command in this process, in the test's own folder; returns stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments, expect=0):
        result = CliRunner().invoke(app, arguments, prog_name="hdet", catch_exceptions=False)
        assert result.exit_code == expect, result.output
        return result.stdout, result.stderr

    return call


def start(command, cwd):
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_run_writes_a_folder_and_a_report_and_says_where(hdet, tmp_path):
    out, err = hdet("run", *QUICK)
    folder = tmp_path / "runs" / "quadratic-lr0.05-seed0"
    assert {p.name for p in folder.iterdir()} == {
        "checkpoints",
        "config.json",
        "environment.json",
        "evaluations.jsonl",
        "records.jsonl",
        "report.html",
        "result.json",
    }
    assert "report: runs/quadratic-lr0.05-seed0/report.html" in out
    assert "finished" in out
    assert "\x1b" not in out + err  # no colours and no progress bar in a pipe
    again, _ = hdet("run", *QUICK)
    assert "runs/quadratic-lr0.05-seed0-2/report.html" in again  # nothing is overwritten


def test_the_papers_settings_are_one_switch_and_what_else_is_given_counts(hdet, tmp_path):
    quick = ["--task", "quadratic", "--steps", "60", "--lr", "0.05"]
    _, err = hdet("run", *quick, "--paper", "--temperature", "0.3", "--out", "here", "--json")
    assert "as in the paper: a sync every 5 steps, and the controller from step 20 on" in err
    run = read_run(tmp_path / "here")
    chosen = {
        "temperature": 0.3,
        "noise_norm": "global",
        "noise_scale": 0.01,
        "optimizer": "adam",
        "probe": False,
    }
    assert chosen.items() <= run.config.items() and run.name == "here"
    in_order = [1 + (r - 3.5) / 3.5 / 9 for r in range(8)]
    rows = [record.multipliers["lr"] for record in run.records]
    assert len(rows) == 12 and all(row == pytest.approx(in_order) for row in rows[:4])
    assert all(sorted(row) == pytest.approx(in_order) != row for row in rows[4:])
    assert run.records[0].base_trace["lr"][0] == pytest.approx(0.05 / 25)  # as OneCycleLR begins


@pytest.mark.parametrize("controller", ["paper", "log", "guard"])
def test_terminal_and_page_name_the_same_learning_rate(hdet, tmp_path, controller):
    # The controller takes over within the warm-up, so that the peak is never reached.
    moves = ["--controller-start", "0", "--spread", "0.3", "--sync-every", "2"]
    moves = [] if controller == "guard" else moves
    out, _ = hdet("run", *QUICK, "--controllers", controller, *moves, "--out", "here")
    (told,) = [line.split()[2] for line in out.splitlines() if line.startswith("learning rate ")]
    tiles = run_tiles(read_run(tmp_path / "here"))
    (shown,) = [value for label, value, _ in tiles if label.startswith("Learning rate")]
    assert float(shown) == float(told)


def test_json_is_one_object_on_stdout(hdet, tmp_path):
    out, err = hdet("run", *QUICK, "--json", "--out", "here")
    result = json.loads(out)
    assert {"final_loss", "metrics", "found_lr", "base_lr", "steps", "seconds", "run_dir"} <= set(result)
    assert (result["status"], result["steps"], result["run_dir"]) == ("finished", 60, "here")
    assert "report:" in err
    out, err = hdet("run", *QUICK, "--json", "--quiet", "--out", "there")
    assert (json.loads(out)["final_loss"], err) == (result["final_loss"], "")


@pytest.mark.parametrize(
    ("arguments", "average_tail", "anneal_to"),
    [
        ([], 0.075, 0.15),
        (["--controllers", "none"], 0.0, 0.0),
        (["--average-tail", "0"], 0.0, 0.0),
        (["--controllers", "none", "--average-tail", "0.2", "--anneal-to", "0.5"], 0.2, 0.5),
    ],
)
def test_the_tail_is_averaged_with_the_guard(hdet, tmp_path, arguments, average_tail, anneal_to):
    hdet("run", *QUICK, *arguments, "--out", "here")
    config = json.loads((tmp_path / "here/config.json").read_text())
    assert (config["average_tail"], config["anneal_to"]) == (average_tail, anneal_to)
    last = json.loads((tmp_path / "here/records.jsonl").read_text().splitlines()[-1])
    assert last["num_averaged_steps"] == round(60 * average_tail)
    rates = [lr for trace in last["base_trace"].values() for lr in trace]
    assert min(rates) / 0.05 >= 0.9 * anneal_to


@pytest.mark.parametrize(
    ("arguments", "controllers"),
    [
        (["--steps", "200", "--sync-every", "5"], ["guard", "thermostat"]),
        (["--steps", "200"], ["guard"]),  # syncs every 10 steps are too few where replicas differ
        (["--steps", "200", "--sync-every", "5", "--warmup", "0.1"], ["guard"]),
        (["--steps", "200", "--sync-every", "5", "--controllers", "none"], []),
        (["--controllers", "thermostat", "--steps", "200", "--sync-every", "5"], ["guard", "thermostat"]),
        (["--task", "digits"], ["guard", HELD_OUT]),
        (["--task", "digits", "--controllers", "guard"], ["guard"]),
        (["--task", "digits", "--replicas", "1"], ["guard"]),  # the run is shorter than an epoch
        (
            ["--task", "digits", "--controllers", f"guard, {HELD_OUT}"],
            ["guard", HELD_OUT],
        ),
        ([], ["guard"]),  # its data never repeat
    ],
    ids=str,
)
def test_what_can_steer_does_and_nobody_says_otherwise(hdet, tmp_path, arguments, controllers):
    hdet("run", *QUICK, "--replicas", "3", *arguments, "--no-find", "--out", "here")
    assert json.loads((tmp_path / "here/config.json").read_text())["controllers"] == controllers
    records = [json.loads(line) for line in (tmp_path / "here/records.jsonl").read_text().splitlines()]
    is_moved = any("weight_decay" in record["controllers"] for record in records)
    assert is_moved is (HELD_OUT in controllers)


def test_bad_arguments_give_one_line_and_code_two(hdet, tmp_path):
    for arguments, message in (
        (["--lr", "-1"], "--lr must be a number above 0, got -1.0"),
        (["--task", "nope"], "task must be one of feed, charlm, digits, quadratic or path/to/file.py:MyTask"),
        (["--explore", "colour=1"], "explore must be one of"),
        (["--option", "depth=3"], "option 'depth' is not known to task 'quadratic'"),
        (["--explore", "momentum"], "--explore must be NAME=VALUE, got 'momentum'"),
        (
            ["--explore", "lr=.2"],
            "another hyperparameter than the learning rate, got lr=0.2: write --spread 0.2",
        ),
        (["--explore", "weight_decay=3"], "explore weight_decay must be a number in [0, 1), got 3"),
        (["--explore", "beta2=.5", "--controllers", "paper"], "--controllers must not hold paper where more"),
        (
            ["--controllers", "pape"],
            "--controllers must be one of 'guard', 'thermostat', ",
        ),
        (["--find", "--steps", "40"], "--steps must be at least 50 to find the learning rate, got 40"),
        (
            ["--controllers", HELD_OUT, "--optimizer", "adam"],
            "--optimizer must be adamw or sgd",
        ),
        (["--controllers", HELD_OUT, "--no-probe"], "got None: leave --no-probe out"),
        (["--controllers", "thermostat", "--steps", "199"], "--steps must be at least 200 for a Thermostat"),
    ):
        out, err = hdet("run", *QUICK, *arguments, expect=2)
        assert message in err
        assert "Traceback" not in err
        assert not out
        assert not list(tmp_path.iterdir())  # nothing was changed
    _, err = hdet("resume", "nowhere", expect=2)
    assert "must be the folder of a run" in err
    _, err = hdet("sweep", "--task", "quadratic", "--lrs", "abc", expect=2)
    assert "--lrs must be numbers with commas between them, got 'abc'" in err
    for arguments, message in (
        (["--low", "0"], "--low must be a number above 0, got 0.0"),
        (["--low", "1", "--high", "0"], "--high must be a number of at least 1, got 0.0"),
        (["--per-decade", "0"], "--per-decade must be an integer of at least 1, got 0"),
        (["--low", "2", "--high", "2.1"], "must hold at least one learning rate, got none: widen --low and"),
    ):
        _, err = hdet("sweep", "--task", "quadratic", *arguments, expect=2)
        assert message in err
    _, err = hdet("report", "nowhere", expect=2)
    assert "nowhere" in err


def test_replicas_that_do_not_fit_into_memory_are_refused(hdet, tmp_path):
    for more in ([], ["--find"], ["--optimizer", "sgd"]):
        _, err = hdet("run", *QUICK, "--option", "size=1000000", "--replicas", "100000", *more, expect=2)
        size = 800 if "sgd" in more else 1.2e3
        assert "replicas must fit into memory, got 100000: their parameters and the moments of" in err
        assert f"take about {size:.3g} GB, and there are" in err
        assert not list(tmp_path.iterdir())


def test_a_run_that_diverges_exits_with_one_and_is_never_silent(hdet, tmp_path):
    arguments = ["--optimizer", "sgd", "--lr", "1e9"]
    out, _ = hdet("run", *QUICK, *arguments, "--json", expect=1)
    assert json.loads(out)["status"] == "failed"
    out, err = hdet("run", *QUICK, *arguments, "--quiet", expect=1)
    assert (out, err[:22]) == ("", "hdet: training failed:")


def test_a_run_that_ends_above_its_start_exits_with_three(hdet, tmp_path):
    arguments = ["--optimizer", "sgd", "--lr", "2.3", "--momentum", "0", "--no-find", "--anneal", "none"]
    arguments += ["--controllers", "none", "--out", "up"]
    out, err = hdet("run", *QUICK, *arguments, "--json", expect=3)
    assert json.loads(out)["status"] == "diverged"
    assert "hdet: training diverged: the held-out loss was" in err
    out, _ = hdet("resume", "up", expect=3)
    assert "has diverged: there is nothing to go on with" in out
    assert "The run diverged after 60 steps" in (tmp_path / "up/report.html").read_text()


def stopped(hdet, tmp_path):
    """The folder of a run that has two checkpoints and no result."""
    hdet("run", *QUICK, "--out", "here")
    (tmp_path / "here/result.json").unlink()
    return sorted((tmp_path / "here/checkpoints").iterdir())


@pytest.mark.parametrize("damage", [b"", b"foreign", None], ids=["empty", "foreign", "cut"])
def test_resume_falls_back_or_says_what_is_wrong(hdet, tmp_path, damage):
    older, newer = stopped(hdet, tmp_path)
    newer.write_bytes(newer.read_bytes()[:99] if damage is None else damage)
    out, _ = hdet("resume", "here")
    assert "step-000060.pt is broken (" in out
    assert f"going on from {older.name}" in out
    assert "finished" in out
    for file in stopped_again(tmp_path):
        file.write_bytes(b"")
    out, err = hdet("resume", "here", expect=2)
    assert not out
    assert len(err.splitlines()) == 1
    assert err.startswith("hdet: ")
    assert err.count("is broken (its checksum is wrong") == 2


def stopped_again(tmp_path):
    (tmp_path / "here/result.json").unlink()
    return sorted((tmp_path / "here/checkpoints").iterdir())


def test_resume_refuses_an_edited_config(hdet, tmp_path):
    stopped(hdet, tmp_path)
    path = tmp_path / "here/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"optimizer": "sgd", "seed": 5}))
    _, err = hdet("resume", "here", expect=2)
    assert "these differ: optimizer ('adamw' before, 'sgd' now), seed (0 before, 5 now)" in err
    path.write_text(json.dumps(config | {"replicas": 3}))
    out, _ = hdet("resume", "here")
    assert "2 replicas before, 3 now" in out
    for text in ("[]", "nothing", json.dumps(config | {"steps": -1})):
        path.write_text(text)
        _, err = hdet("resume", "here", expect=2)
        assert len(err.splitlines()) == 1


def test_resume_runs_code_that_a_folder_names_only_if_it_is_trusted(hdet, tmp_path):
    stopped(hdet, tmp_path)
    path, ran = tmp_path / "here/config.json", tmp_path / "ran"
    (tmp_path / "task.py").write_text(f"import pathlib; pathlib.Path({str(ran)!r}).touch()")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task": "task.py:Task"}))
    _, err = hdet("resume", "here", expect=2)
    assert "--trust must be given for a task of your own, got 'task.py:Task'" in err
    assert not ran.exists()
    _, err = hdet("resume", "here", "--trust", expect=2)
    assert "task must name a class" in err and ran.exists()


@pytest.mark.parametrize("command", ["run", "sweep", "ablate", "report"])
def test_an_empty_folder_is_not_the_current_one(hdet, tmp_path, command):
    arguments = ["."] if command == "report" else ["--task", "quadratic"]
    _, err = hdet(command, *arguments, "--out", "", expect=2)
    assert "it must be a folder, got ''" in err and not list(tmp_path.iterdir())


def test_a_sweep_runs_learning_rates_of_one_name_once(hdet, tmp_path):
    arguments = ["--task", "quadratic", "--steps", "60", "--jobs", "1", "--json"]
    out, _ = hdet("sweep", *arguments, "--lrs", "0.1,0.1,0.10000001", "--out", "here")
    assert len(json.loads(out)["points"]) == 1
    assert [folder.name for folder in (tmp_path / "here").iterdir() if folder.is_dir()] == ["lr0.1"]


def test_a_run_is_replaced_only_once_the_new_one_can_begin(hdet, tmp_path):
    hdet("run", *QUICK, "--out", "kept")
    before = contents(tmp_path / "kept")
    for arguments in (
        ["--find", "--steps", "40"],
        ["--explore", "weight_decay=3", "--weight-decay", "0.1"],
        ["--device", "no"],
    ):
        hdet("run", *QUICK, *arguments, "--out", "kept", "--overwrite", expect=2)
        hdet("run", *QUICK, *arguments, "--out", "other", expect=2)
    assert contents(tmp_path / "kept") == before
    assert not (tmp_path / "other").exists()
    out, _ = hdet("resume", "kept")
    assert "has finished" in out
    assert contents(tmp_path / "kept") == before


@pytest.mark.timeout(200)
def test_ctrl_c_saves_and_resume_ends_where_the_whole_run_does(hdet, tmp_path):
    arguments = [*QUICK, "--steps", "2000", "--json"]
    whole, _ = hdet("run", *arguments, "--out", "whole")
    process = start(["hdet", "run", *arguments, "--out", "parts"], tmp_path)
    while not list((tmp_path / "parts").glob("checkpoints/*.pt")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert json.loads(out)["status"] == "stopped"
    assert "go on with: hdet resume parts" in err
    resumed, _ = hdet("resume", "parts", "--json")
    assert json.loads(resumed)["final_loss"] == json.loads(whole)["final_loss"]


def wait_for(process, stream, words):
    """Read what a process says until these words come."""
    said = ""
    while words not in said:
        line = stream.readline()
        assert line, process.stderr.read()
        said += line
    return said


def listening(pids):
    """The addresses at which these processes listen, as /proc writes them."""
    files = [file for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir()]
    held = {str(file.readlink()) for file in files if file.is_symlink()}
    rows = [
        row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/net/{kind}").read_text().splitlines()
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held}


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
@pytest.mark.timeout(200)
def test_ranks_of_one_machine_listen_on_loopback_alone_and_stop_together(tmp_path):
    command = ["hdet", "run", *QUICK, "--steps", "100000", "--no-find", "--ranks", "2", "--json"]
    process = start([*command, "--out", "here"], tmp_path)
    seen = set()
    while not list((tmp_path / "here").glob("checkpoints/*.pt")):
        assert process.poll() is None, process.communicate()
        with contextlib.suppress(OSError):
            seen |= listening([process.pid, *children(process.pid)])
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert json.loads(out)["status"] == "stopped" and "go on with: hdet resume here" in err
    assert seen == {"0100007F"}
    assert json.loads((tmp_path / "here/config.json").read_text())["replicas"] == 2


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


@pytest.mark.timeout(200)
def test_ctrl_c_during_the_search_leaves_nothing(tmp_path):
    command = ["hdet", "run", "--task", "feed", "--steps", "20000", "--replicas", "2"]
    process = start([*command, "--out", "here", "--track", "tensorboard"], tmp_path)
    wait_for(process, process.stdout, "searching for the learning rate ...")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "stopped while searching for the learning rate: nothing was trained" in out
    assert "Traceback" not in out + err
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(200)
def test_ctrl_c_under_torchrun_saves(hdet, tmp_path):
    arguments = [*QUICK, "--steps", "100000", "--no-find", "--evaluate-every", "100"]
    process = start([*TORCHRUN, "hdet", "run", *arguments, "--out", "parts", "--json"], tmp_path)
    while not list((tmp_path / "parts").glob("checkpoints/*.pt")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert json.loads(out)["status"] == "stopped", out + err
    assert "go on with: hdet resume parts" in err


@pytest.mark.timeout(200)
@pytest.mark.parametrize("door", ["torchrun", "--ranks"])
def test_ranks_end_where_virtual_replicas_do(hdet, tmp_path, door):
    before, after = (TORCHRUN, []) if door == "torchrun" else ([], ["--ranks", "2"])
    process = start([*before, "hdet", "run", *QUICK, "--json", *after], tmp_path)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, out + err
    ranks = json.loads(out)
    virtual, _ = hdet("run", *QUICK, "--json", "--out", "virtual")
    assert ranks["final_loss"] == pytest.approx(json.loads(virtual)["final_loss"], rel=1e-5)
    assert (tmp_path / ranks["run_dir"] / "report.html").exists()


def test_sweep_and_report_compare_runs(hdet, tmp_path):
    sweep = ["sweep", "--task", "quadratic", "--steps", "40", "--lrs", "0.001,0.03,1", "--out", "s"]
    out, _ = hdet(*sweep, "--json")
    result = json.loads(out)
    assert [p["base_lr"] for p in result["points"]] == [0.001, 0.03, 1.0]
    assert result["best"] == min(result["points"], key=lambda p: p["final_loss"])
    out, _ = hdet(*sweep)
    assert "← best" in out
    records = tmp_path / "s" / "lr1" / "records.jsonl"
    records.write_text(records.read_text() + '{"round": 99, "ste')
    out, _ = hdet("report", "s/lr1", "s/lr0.03", "--out", "both.html", "--json")
    assert json.loads(out)["notes"]["lr1"]
    assert (tmp_path / "both.html").stat().st_size < 6_000_000
    (tmp_path / "s" / "comparison.html").unlink()
    out, _ = hdet("report", "s")  # the page of a sweep again
    assert "report: s/comparison.html" in out and (tmp_path / "s" / "comparison.html").exists()


def test_trackers_can_be_named(hdet, tmp_path):
    hdet("run", *QUICK, "--track", "tensorboard", "--out", "t")
    assert list((tmp_path / "t" / "tensorboard").iterdir())


def test_plan_predicts_and_explains(hdet, tmp_path):
    arguments = ["--parameters", "125M", "--replicas", "8", "--step-seconds", "0.5", "--bandwidth", "25"]
    averaged = [*arguments, "--spread", "0.1", "--sync-every", "1000"]
    out, _ = hdet("plan", *averaged, "--json")
    assert json.loads(out)["links"][0]["overhead_percent"] == pytest.approx(0.114, abs=0.001)
    out, _ = hdet("plan", *arguments, "--json")
    answer = json.loads(out)
    assert answer["links"][0]["bytes_per_sync"] == 72 * 7
    assert answer["heard_from"] is None
    out, _ = hdet("plan", *averaged, "--signal", "0.45")
    assert "A controller hears the replicas from about T = 1040 on" in " ".join(out.split())
    assert answer["memory"]["guard"] == 3 * answer["memory"]["tail"] == 3 * 500_000_000 / 8
    assert answer["search"]["most_steps"] == 315
    out, _ = hdet("plan", *arguments)
    assert "tail: mean of the last steps" in out and "The search" in out
    _, err = hdet("plan", *arguments[2:], "--parameters", "lots", expect=2)
    assert "parameters must be a count such as 125e6, 350M or 7B, got 'lots'" in err


def test_ablate_prints_table_1_and_writes_a_page(hdet, tmp_path):
    quick = ["--task", "quadratic", "--steps", "60", "--replicas", "2", "--jobs", "1", "--lr", "0.3"]
    out, err = hdet("ablate", *quick, "--json")
    data = json.loads(out)
    assert len(data["rows"]) == 8
    assert data["rows"][0]["lr"] == pytest.approx(0.3 / 9)
    assert "Baseline-Low" in err
    assert "report: runs/ablate-quadratic/ablation.html" in err
    assert {p.name for p in (tmp_path / "runs/ablate-quadratic").iterdir()} == {
        "ablation.html",
        "ablation.json",
    }
    for arguments, message in (
        (["--steps", "20"], "steps must be an integer of at least 50"),
        (["--optimizer", "adagrad"], "optimizer must be one of"),
    ):
        _, err = hdet("ablate", *quick, *arguments, expect=2)
        assert message in err


@pytest.mark.parametrize("command", ["run", "resume", "sweep", "ablate", "report", "plan"])
def test_help_teaches(command, hdet, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out, _ = hdet(command, "--help")
    assert "Usage: hdet" in out
    assert "\x1b" not in out

"""The comparison: ratios against values by hand, what is resumed, what is shown."""

import json
import math
import os
import re
import signal
import sys

import pytest
import typer
from typer.testing import CliRunner

from hdet.errors import HdetError
from hdet.lab.page import html_page
from research.commands.compare import compare as command
from research.compare import compare, ledger, read_comparison, table
from research.compare.page import _charts, build_comparison
from research.compare.summary import Comparison
from research.peers import METHODS
from research.peers.base import Method
from research.peers.grid import lr_at

TINY = ("quadratic", {"size": 8})
CASE = {"task": "quadratic", "task_options": {"size": 8}, "optimizer": "sgd", "steps": 20, "replicas": 2}


def record(method, start, seed, lr, loss, *, seconds=1.0, found_lr=None):
    return CASE | {
        "method": method,
        "start": start,
        "seed": seed,
        "lr": lr,
        "final_loss": loss,
        "found_lr": found_lr,
        "seconds": seconds,
        "diverged": loss is None,
    }


# Losses are 4 and 4 at 0.1, mean 4; at 1 they are 1 and 3, mean 2, the best; at 10 one run diverged.
SWEEP = [
    record("sweep", None, seed, lr, loss, seconds=2.0)
    for lr, losses in ((0.1, (4.0, 4.0)), (1.0, (1.0, 3.0)), (10.0, (0.5, None)))
    for seed, loss in enumerate(losses)
]
RUNS = [
    record("plain_linear", 1.0, 0, 1.0, 1.0, seconds=2.0),
    record("plain_linear", 1.0, 1, 1.0, 3.0, seconds=4.0),
    record("plain_linear", 10.0, 0, 10.0, None, seconds=0.1),
    record("plain_linear", 10.0, 1, 10.0, 5.0, seconds=3.0),
    record("hdet_log", 1.0, 0, 1.0, 2.0, seconds=6.0, found_lr=2.0),
    record("hdet_log", 1.0, 1, 1.0, 2.2, seconds=6.0, found_lr=0.5),
    record("hdet_log", 10.0, 0, 10.0, 3.0, seconds=6.0),
    record("hdet_log", 1.0, 0, 0.1, 99.0),  # of a sweep that had another best
    record("dog", None, 0, None, 2.5, seconds=3.0),
    record("dog", None, 1, None, 3.5, seconds=3.0),
]


def test_ratios_are_to_the_lowest_mean_over_seeds():
    (case,) = Comparison(SWEEP + RUNS).cases
    assert (case.best_lr, case.best_loss, case.seeds) == (1.0, 2.0, [0, 1])
    assert case.sweep == {0.1: 4.0, 1.0: 2.0, 10.0: math.inf}
    rows = {row.method: row for row in case.rows}
    assert list(rows) == ["best_of_sweep", "plain_linear", "dog", "hdet_log"]
    assert rows["best_of_sweep"].cells[10.0].ratios == [0.5, 1.5]
    assert (rows["best_of_sweep"].cost, rows["best_of_sweep"].relative_seconds) == (3, 2.0)  # 6 s over 3
    assert rows["hdet_log"].cells[1.0].ratios == [1.0, 1.1]
    assert rows["hdet_log"].cells[1.0].deviation == pytest.approx(0.1 / math.sqrt(2))
    assert rows["hdet_log"].cells[1.0].found_lr == pytest.approx(1.0)
    assert rows["hdet_log"].relative_seconds == 2.0
    assert rows["plain_linear"].relative_seconds == 1.0  # a run that diverged early is not counted
    cell = rows["plain_linear"].cells[10.0]
    assert (cell.ratios, cell.mean, cell.deviation) == ([math.inf, 2.5], math.inf, None)
    assert rows["dog"].cells[1.0] == rows["dog"].cells[10.0]


def test_the_table():
    lines = table(Comparison(SWEEP + RUNS)).splitlines()
    assert lines[:10] == [
        "### quadratic, size=8, sgd: 20 steps, 2 replicas, 2 seeds",
        "",
        "Best of the sweep: held-out loss 2 at LR 1.",
        "",
        "| method | x1 | x10 | runs | time |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| best_of_sweep | 1.000 ± 0.707 | 1.000 ± 0.707 | 3 | ~2.00 |",
        "| plain_linear | 1.000 ± 0.707 | diverged 1/2 | 1 | ~1.00 |",
        "| dog | 1.500 ± 0.354 | 1.500 ± 0.354 | 1 | ~1.00 |",
        "| hdet_log | 1.050 ± 0.071 | 1.500 | 1 | ~2.00 |",
    ]


def test_a_time_that_was_measured_in_turn_stands_for_all_others():
    (case,) = Comparison([*SWEEP, *RUNS[:-1], RUNS[-1] | {"relative_seconds": 1.25}]).cases
    dog = next(row for row in case.rows if row.method == "dog")
    assert (dog.relative_seconds, dog.time) == (1.25, "1.25")


def test_a_table_of_nothing_much(tmp_path):
    assert table(Comparison([])).startswith("Held-out loss")
    assert "<h2" not in build_comparison(Comparison([]), tmp_path / "page.html").read_text()
    for records in ([SWEEP[-1]], [RUNS[0]]):
        assert "The sweep has no result yet." in table(Comparison(records))
        page = build_comparison(Comparison(records), tmp_path / "page.html").read_text()
        assert "The sweep has no result yet." in page


def test_the_page_has_a_table_and_charts_and_escapes(tmp_path):
    evil = [r | {"task": "<script>alert(1)</script>", "task_options": {"a": '"><b>'}} for r in SWEEP + RUNS]
    page = build_comparison(Comparison(evil), tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "<b>" not in page.partition('<script type="application/json"')[0]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    worst = "dog does best from its worst start: 1.500 times the best loss of the sweep."
    assert f'<p class="headline">{worst}</p>' in page
    assert page.count('class="plot"') == 2
    assert page.count("</table>") == 2  # results and methods
    assert re.findall(r'<th scope="row" data-value="(\w+)"', page)[:4] == [
        "best_of_sweep",
        "plain_linear",
        "dog",
        "hdet_log",
    ]
    best = r'<td class="number best" data-value="([\d.]+)">([^<]+) <span'
    assert re.findall(best, page) == [("1.0", "1.000 ± 0.707"), ("1.5", "1.500 ± 0.354"), ("1.5", "1.500")]


def test_the_chart_draws_what_is_off_the_scale_as_crosses_at_its_edge():
    (case,) = Comparison(SWEEP + RUNS).cases
    losses, rates = _charts(case, 1.0)
    by_name = {trace["name"]: trace for trace in losses.traces}
    plain = by_name["plain_linear"]
    assert (plain["x"], plain["y"]) == ([1.0, 10.0], [1.0, 2.0])
    assert plain["customdata"] == ["1.000 ± 0.707", "diverged 1/2"]
    assert plain["marker"]["symbol"] == ["circle", "x"]
    assert by_name["hdet_log"]["line"]["width"] > plain["line"]["width"]
    found = {trace["name"]: (trace["x"], trace["y"]) for trace in rates.traces}
    assert found["hdet_log"] == ([1.0], [pytest.approx(1.0)])
    assert "plain_linear" not in found


@pytest.fixture
def counted(monkeypatch):
    """How many runs were made."""
    made = []
    original = ledger._train_one
    monkeypatch.setattr(ledger, "_train_one", lambda spec: made.append(spec) or original(spec))
    return made


def settings(**changes):
    return {
        "methods": ("plain_linear", "dog"),
        "optimizers": ("sgd",),
        "starts": (0.1, 1, 10),
        "seeds": 2,
        "steps": 20,
        "replicas": 2,
        "num_jobs": 1,
    } | changes


def test_what_is_there_is_not_run_again(tmp_path, counted):
    progress = []
    first = compare([TINY], **settings(), folder=tmp_path, on_done=lambda *pair: progress.append(pair))
    assert first.is_complete
    lines = (tmp_path / "compare.jsonl").read_text().splitlines()
    assert len(lines) == len(counted) == len(first.records)
    assert json.loads(lines[0]).keys() >= {"task", "method", "start", "lr", "final_loss", "hdet", "diverged"}
    assert progress[0][0] == 0
    assert all(done <= total for done, total in progress)

    (case,) = first.cases
    assert len(case.sweep) >= 11
    plain, dog = case.rows[1:]
    assert plain.cells[1.0].ratios == case.rows[0].cells[1.0].ratios  # the same runs as the sweep's best
    assert len(dog.cells[0.1].ratios) == 2
    assert sum(spec["method"] == "dog" for spec in counted) == 2  # the start does not matter to it

    made = len(counted)
    with (tmp_path / "compare.jsonl").open("a") as file:
        file.write('{"task": "quadra')  # as a crash would leave it
    again = compare([TINY], **settings(), folder=tmp_path)
    assert len(counted) == made
    assert again.cases == first.cases
    more = compare(
        [TINY], **settings(methods=("plain_linear", "plain_cosine", "best_of_sweep")), folder=tmp_path
    )
    assert len(counted) == made + 3 * 2
    assert [row.method for row in more.cases[0].rows] == [
        "best_of_sweep",
        "plain_linear",
        "plain_cosine",
        "dog",
    ]
    assert read_comparison([tmp_path, tmp_path]).cases == more.cases  # twice the same runs are the same runs


def test_times_are_measured_once_and_change_nothing_else(tmp_path, counted, monkeypatch):
    first = compare([TINY], **settings(seeds=1), folder=tmp_path)
    timed = compare([TINY], **settings(seeds=1), folder=tmp_path, is_timed=True)
    assert timed.is_complete
    found = [record for record in timed.records if "relative_seconds" in record]
    assert [(record["method"], record["start"]) for record in found] == [("plain_linear", 1), ("dog", None)]
    assert all(record["relative_seconds"] > 0 for record in found)
    assert [row.time[0] for row in timed.cases[0].rows[1:]] != ["~", "~"]
    for before, after in zip(first.records, timed.records, strict=True):
        assert after == before | {key: after[key] for key in after.keys() & {"relative_seconds"}}

    monkeypatch.setattr(ledger, "seconds_in_turn", lambda *_: pytest.fail("it was there"))
    made = len(counted)
    assert compare([TINY], **settings(seeds=1), folder=tmp_path, is_timed=True).cases == timed.cases
    assert len(counted) == made


@pytest.mark.parametrize(
    ("seconds", "added"),
    [([3.0, 2.0], {"relative_seconds": 1.5}), ([None, 2.0], {}), ([3.0, None], {})],  # None: it diverged
)
def test_a_time_is_over_that_of_the_plain_run_in_turn(monkeypatch, seconds, added):
    timed = []

    def in_turn(methods, job):
        timed.append([method.name for method in methods])
        return seconds[: len(methods)]

    monkeypatch.setattr(ledger, "seconds_in_turn", in_turn)
    assert ledger.timed_in_turn(RUNS[-1]) == RUNS[-1] | added
    assert timed == [["plain_linear"], ["dog", "plain_linear"]]  # the first warms the process up


def test_a_stop_keeps_what_is_done(tmp_path, counted):
    stopped = compare([TINY], **settings(), folder=tmp_path, should_stop=lambda: len(counted) >= 5)
    assert (stopped.is_complete, len(stopped.records)) == (False, 5)
    assert compare([TINY], **settings(), folder=tmp_path).is_complete
    assert len({json.dumps(spec, sort_keys=True) for spec in counted}) == len(counted)


def test_ctrl_c_ends_the_run_under_way_and_keeps_the_others(tmp_path, monkeypatch):
    original = ledger._train_one

    def interrupted(spec):
        if spec["lr"] == lr_at(0):
            os.kill(os.getpid(), signal.SIGINT)
        return original(spec)

    monkeypatch.setattr(ledger, "_train_one", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    stopped = compare([TINY], **settings(), folder=tmp_path)
    assert not stopped.is_complete
    assert stopped.records
    assert all(found["lr"] < 1 for found in stopped.records)
    assert signal.getsignal(signal.SIGINT) is handler


def test_processes_give_what_this_one_gives(tmp_path):
    changes = {"methods": ("best_of_sweep",), "seeds": 1}
    alone = compare([TINY], **settings(**changes), folder=tmp_path / "1")
    side_by_side = compare([TINY], **settings(**changes, num_jobs=2), folder=tmp_path / "2")
    assert side_by_side.is_complete
    assert side_by_side.cases[0].sweep == alone.cases[0].sweep


def test_a_diverged_run_is_stored_without_a_loss(tmp_path):
    result = compare([TINY], **settings(methods=("plain_linear",), starts=(1e6,), seeds=1), folder=tmp_path)
    stored = [json.loads(line) for line in (tmp_path / "compare.jsonl").read_text().splitlines()]
    (lost,) = [line for line in stored if line["method"] == "plain_linear"]
    assert (lost["diverged"], lost["final_loss"]) == (True, None)
    assert "| plain_linear | diverged 1/1 | 1 | - |" in table(result)


def test_bad_arguments_are_named_before_anything_runs(tmp_path, monkeypatch):
    for changes, message in (
        ({"methods": ("magic",)}, "methods must be one of"),
        ({"methods": ()}, "methods must hold at least one"),
        ({"optimizers": ("adam",)}, "optimizers must be one of"),
        ({"starts": (0.0,)}, "starts must be a number above 0"),
        ({"starts": ()}, "seeds and starts must hold"),
        ({"seeds": 0}, "seeds must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            compare([TINY], **settings(**changes), folder=tmp_path)
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(HdetError, match="pip install"):
        compare([TINY], **settings(methods=("schedulefree",)), folder=tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"has no compare\.jsonl"):
        read_comparison([tmp_path])


def test_a_method_that_cannot_run_says_which(tmp_path, monkeypatch):
    monkeypatch.setattr(Method, "require", lambda *_: None)  # somebody's method that fails only when it runs
    with pytest.raises(HdetError, match="method 'hdet_find' cannot run: total_steps must be"):
        compare([TINY], **settings(methods=("hdet_find",), seeds=1), folder=tmp_path)
    assert ledger.read_ledger(tmp_path / "compare.jsonl")  # the sweep is kept


@pytest.fixture
def hdet_compare(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(command)

    def call(*arguments, expect=0):
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == expect, result.output
        return result.stdout, result.stderr

    return call


QUICK = ["--task", "quadratic", "--option", "size=8", "--steps", "20", "--seeds", "1", "--replicas", "2"]
QUICK += ["--optimizer", "sgd", "--jobs", "1"]


def test_the_command(hdet_compare, tmp_path, monkeypatch):
    out, _ = hdet_compare(*QUICK, "--methods", "plain_linear,dog", "--starts", "1,10")
    assert "| plain_linear | 1.000 |" in out
    folder = tmp_path / "runs" / "compare"
    assert {p.name for p in folder.iterdir()} == {"compare.jsonl", "compare.md", "compare.html"}
    markdown = (folder / "compare.md").read_text(encoding="utf-8")
    assert markdown.strip() in out

    out, err = hdet_compare("--table", str(folder), "--json")
    data = json.loads(out)
    assert "| plain_linear |" in err
    assert data["is_complete"]
    assert data["cases"][0]["rows"][1]["cells"]["1"]["mean"] == 1.0
    out, err = hdet_compare("--table", str(folder), str(folder), "--quiet")
    assert (out, err) == ("", "")

    (folder / "compare.html").unlink()
    html_page._plotly_script.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    out, _ = hdet_compare("--table", str(folder))
    assert "no report: a report needs plotly" in out
    assert "| plain_linear |" in out
    assert not (folder / "compare.html").exists()

    out, _ = hdet_compare("--methods", "help")
    assert len(out.splitlines()) >= len(METHODS)


def test_the_command_refuses_what_it_does_not_know(hdet_compare):
    for arguments, message in (
        (["--methods", "magic"], "methods must be one of"),
        (["--starts", "a"], "--starts must be numbers with commas between them, got 'a'"),
        (["--table"], "must be followed by a folder"),
        (["--table", "nowhere"], "has no compare.jsonl"),
        (["somewhere"], "folders go with --table"),
    ):
        _, err = hdet_compare(*QUICK, *arguments, expect=2)
        assert message in err


def test_what_cannot_run_is_refused_before_the_rest_runs(tmp_path):
    for method, least in (("hdet_find", 50), ("hdet_log", 26), ("hdet_paper", 26)):
        with pytest.raises(ValueError, match=f"steps must be at least {least} for {method}, got {least - 1}"):
            compare([TINY], methods=["plain_linear", method], steps=least - 1, folder=tmp_path / "none")
        METHODS[method].require(least)
    assert not (tmp_path / "none").exists()

"""What the report makes of the search before a run."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hdet.lab.page import Run, headline, read_run, sentence
from hdet.lab.page.chart import Chart
from hdet.lab.page.loss_charts import search_charts
from hdet.lab.page.run_numbers import asked_lr, found_lr
from hdet.lab.page.sentences import figure
from hdet.records import SearchRecord
from tests.helpers.runs import real_records, write_run

NAN, INF, HUGE = math.nan, math.inf, 1e308
SEARCH = SearchRecord(
    asked=1e-4,
    found=3.2e-3,
    low=1.6e-3,
    high=6.1e-3,
    reason="trials, weighed against your guess",
    num_steps=1234,
    ramp=[[1e-6, 2.0], [1e-4, 1.9], [1e-2, 1.0], [1e-1, 1.5], [1.0, 50.0], [2.0, 1e9]],
    trials=[[1e-2, 0.9], [1e-3, 0.8], [3e-2, None], [1e-1, 40.0]],
)


def run(search: SearchRecord, **more: Any) -> Run:
    return Run(path=Path("a"), name="a", search=search, **more)


def chart_of(one: Run) -> Chart:
    (chart,) = search_charts(one)
    json.dumps(chart.data(2000), allow_nan=False)
    return chart


def traces_of(chart: Chart) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in chart.traces}


def test_a_real_search_is_drawn_as_it_was_recorded(tmp_path: Path) -> None:
    one = read_run(write_run(tmp_path / "run", controllers=("guard",)))
    search = real_records("guard")[0][0].search
    assert search is not None and one.search == search
    traces = traces_of(chart_of(one))
    trials = traces["trials"]
    assert [list(pair) for pair in zip(trials["x"], trials["y"], strict=True)] == sorted(search.trials)
    assert traces["guess: 0.01"]["x"] == [0.01, 0.01]
    assert traces[f"found: {figure(search.found)}"]["x"] == [search.found] * 2
    likely = f"likely: {figure(search.low, 2)} to {figure(search.high, 2)} (80 %)"
    assert traces[likely]["x"] == [search.low, search.high]


def test_by_hand() -> None:
    chart = chart_of(run(SEARCH, config={"loss_unit": "nats"}))
    traces = traces_of(chart)
    assert (traces["trials"]["x"], traces["trials"]["y"]) == ([1e-3, 1e-2], [0.8, 0.9])
    bad = traces["far above, or not finite"]
    assert bad["x"] == [3e-2, 1e-1] and bad["customdata"][0] == "trial, loss not finite nats"
    # The untrained loss is 2 and the best 0.8: what is above 2 + 0.2 * 1.2 would flatten the rest.
    bottom, top = chart.layout["yaxis"]["range"]
    assert (bottom, top) == pytest.approx((0.8 - 0.08 * 1.44, 2.24 + 0.08 * 1.44))
    assert chart.y_title == "loss (nats)" and chart.layout["xaxis"] == {"type": "log"}
    assert "The answer comes from trials, weighed against the guess" in chart.caption


def test_what_was_found_is_said() -> None:
    one = run(SEARCH)
    assert headline(one) == "Found a learning rate of 3.2e-3, 32 times the guess of 1e-4."
    assert sentence(one).startswith(
        "The best learning rate is probably between 1.6e-3 and 6.1e-3 (80 %). The search took 1,234 steps. "
    )
    lower = run(replace(SEARCH, asked=0.032))
    assert headline(lower) == "Found a learning rate of 3.2e-3, 10 times below the guess of 0.032."
    assert (asked_lr(one), found_lr(one)) == (1e-4, 3.2e-3)


def test_an_answer_that_is_too_far_off_is_said_to_need_another_search() -> None:
    assert sentence(run(replace(SEARCH, asked=1e-6))).startswith(
        "The search went to its limits. Search again with this learning rate as the guess. "
    )


def test_a_number_that_was_kept_is_said_with_the_reason() -> None:
    kept = replace(
        SEARCH, found=1e-4, reason="your guess, because the search could not tell: no trial learnt anything"
    )
    assert (
        headline(run(kept))
        == "Kept the guess of 1e-4 for the learning rate, because no trial learnt anything."
    )


def test_a_search_that_agrees_with_the_user_is_said() -> None:
    close = replace(SEARCH, found=1.03e-4)
    assert headline(run(close)) == "Found a learning rate of 1.03e-4, close to the guess of 1e-4."


def test_a_run_that_has_only_searched_says_so(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", controllers=("guard",), is_finished=False, num_records=1)
    (path / "evaluations.jsonl").write_text("")
    one = read_run(path)
    assert one.notes == [] and one.records == [] and one.search is not None
    assert headline(one).startswith(f"Found a learning rate of {figure(one.search.found)}, ")
    assert sentence(one).endswith(" The run is unfinished. It has not trained yet.")


@pytest.mark.parametrize("search", [5, {"asked": 1.0}, {"asked": "x"}, {"ramp": [[1]]}, {"trials": 3}])
def test_a_broken_search_becomes_a_note(tmp_path: Path, search: Any) -> None:
    path = write_run(tmp_path / "run", controllers=("guard",))
    first, *rest = (path / "records.jsonl").read_text().splitlines()
    broken = json.loads(first)
    is_part = isinstance(search, dict) and "asked" not in search
    broken["search"] = broken["search"] | search if is_part else search
    (path / "records.jsonl").write_text("\n".join([json.dumps(broken), *rest]) + "\n")
    one = read_run(path)
    assert one.search is None and len(one.records) == 60
    assert len(one.notes) == 1 and one.notes[0].startswith("records.jsonl, line 1: not a round record (")


@pytest.mark.parametrize(
    "change",
    [
        {"ramp": [], "trials": []},
        {"ramp": [[0.0, 1.0], [-1.0, 2.0], [NAN, 1.0]], "trials": [[1.0, None]]},
        {"ramp": []},
        {"trials": [[1.0, NAN], [2.0, INF], [3.0, -INF]]},
        {"ramp": [[1.0, HUGE], [2.0, -HUGE]]},
        {"ramp": [[5e-324, 1.0], [HUGE, 1.0]], "trials": [[HUGE, 1.0]]},
        {"low": NAN, "high": INF},
        {"low": 2.0, "high": 1.0},
        {"asked": 0.0, "found": -1.0},
        {"asked": NAN, "found": INF, "low": -INF},
    ],
)
def test_odd_searches_do_no_harm(change: dict[str, Any]) -> None:
    one = run(replace(SEARCH, **change))
    for chart in search_charts(one):
        json.dumps(chart.data(2000), allow_nan=False)
    assert headline(one).endswith(".") and sentence(one)

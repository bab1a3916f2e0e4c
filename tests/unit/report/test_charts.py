import json
import math
from pathlib import Path
from typing import Any

import pytest

from hdet.report import Run, read_run
from hdet.report.chart import Chart, Pool, line
from hdet.report.compare import comparison_charts, comparison_table
from hdet.report.finders import finder_charts
from hdet.report.series import (
    across_spread,
    base_series,
    by_slot,
    differences_from_mean,
    fan_limits,
    plan_series,
    thin,
)
from hdet.report.steering import controller_charts, hyperparameter_charts
from hdet.report.training import health_charts, training_charts
from hdet.telemetry import RoundRecord
from tests.helpers.runs import real_records, write_run


def record(step: int = 10, **more: Any) -> RoundRecord:
    return RoundRecord(round=0, step=step, num_replicas=2, **more)


def run(*records: RoundRecord, **more: Any) -> Run:
    return Run(path=Path("a"), name="a", records=list(records), **more)


def all_charts(one: Run, max_points: int = 2000) -> list[Chart]:
    parts = (training_charts, finder_charts, hyperparameter_charts, controller_charts, health_charts)
    return [chart for part in parts for chart in part(one, max_points)]


def test_thinning_keeps_the_ends_and_the_extremes() -> None:
    column: list[float | None] = [math.sin(i / 50) for i in range(10_000)]
    column[4321], column[77] = 9.0, None
    kept = thin([column, [0.0] * 10_000], 100)
    assert len(kept) <= 100 and kept[0] == 0 and kept[-1] == 9999 and 4321 in kept


def test_thinning_survives_gaps() -> None:
    assert thin([[None] * 100], 10) and thin([], 10) == [] and thin([[math.nan] * 50, [math.inf] * 50], 10)


def test_the_base_has_a_point_per_step() -> None:
    one = run(
        record(3, num_steps=3, base_trace={"lr": [1.0, 2.0, 3.0]}),
        record(6, num_steps=3, base_trace={"lr": [4.0]}),
    )
    assert base_series(one, "lr") == ([1, 2, 3, 4, 6], [1.0, 2.0, 3.0, 4.0, 4.0])
    assert base_series(run(record(3, base={"lr": 5.0})), "lr") == ([3], [5.0])


def test_places_follow_positions_not_replicas() -> None:
    records = [
        record(1, losses=[1.0, 2.0], positions={"lr": [1.0, -1.0]}),
        record(2, losses=[3.0, None], positions={"lr": [-1.0, 1.0]}),
        record(3, losses=[5.0, 6.0]),
    ]
    low, high = by_slot(records, "losses", "lr")
    assert low == (-1.0, [2.0, 3.0, None], [1, 0, None]) and high.values == [1.0, None, None]


@pytest.mark.parametrize(("values", "low", "high"), [([0.5, 1.5], 0.5, 1.5), ([1.0, 1.0], 1.0, 1.0)])
def test_the_fan_is_the_base_times_the_factors(values: list[float], low: float, high: float) -> None:
    one = run(
        record(1, num_steps=1, base_trace={"lr": [1.0]}, multipliers={"lr": values}, values={"lr": values})
    )
    assert fan_limits(one, "lr") == ([1], [low], [high])


def test_the_fan_of_a_momentum_is_one_of_its_complement() -> None:
    one = run(
        record(
            1, num_steps=1, base_trace={"m": [0.9]}, multipliers={"m": [0.5, 1.5]}, values={"m": [0.95, 0.85]}
        )
    )  # fmt: skip
    _, low, high = fan_limits(one, "m")
    assert (low[0], high[0]) == pytest.approx((0.85, 0.95))


def test_the_plan_is_the_base_without_the_correction() -> None:
    more = {"num_steps": 2, "correction": {"lr": 2.0}}
    first = record(2, base_trace={"lr": [1.0, 2.0], "lr[1]": [5.0]}, base={"lr": 6.0}, **more)
    second = record(4, base_trace={"lr": [6.0, 8.0], "lr[1]": [10.0]}, base={"lr": 9.0}, **more)
    assert plan_series(run(first, second), "lr") == ([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])
    assert plan_series(run(first, second), "lr[1]") == ([1, 2, 3, 4], [5.0, 5.0, 5.0, 5.0])
    held = run(first, second, config={"controller": "paper"})
    assert plan_series(held, "lr") == ([1, 2, 2, 4], [1.0, 2.0, 3.0, 4.5])
    assert plan_series(run(record(base={"lr": 3.0}, correction={"lr": 1.0})), "lr") == ([], [])


def test_the_plan_of_a_run_that_was_scouted_is_without_what_the_scout_chose(tmp_path: Path) -> None:
    one = read_run(write_run(tmp_path / "run", has_finder=True))
    planned = dict(zip(*plan_series(one, "lr.head"), strict=True))
    scout = one.scouting[-1].scout
    assert scout is not None and scout.decision is not None and scout.decision.factor > 2
    (first, *_), (base, *_) = base_series(one, "lr.head")
    assert (first, planned[first]) == (49, pytest.approx(base / scout.decision.factor))
    # The controller moves between two syncs as well, so that this is near the peak of the plan only.
    assert max(planned.values()) == pytest.approx(0.01, rel=0.05)


def test_losses_across_the_spread() -> None:
    spread = {"positions": {"lr": [-1.0, 1.0]}, "multipliers": {"lr": [0.9, 1.1]}}
    records = [record(i, losses=[1.0 + i, 3.0 + i], **spread) for i in range(4)]
    records.append(record(9, losses=[0.0, 100.0], excluded={1: "outlier"}, **spread))
    low, high = across_spread(records, differences_from_mean(records), "lr")
    assert low == pytest.approx((0.9, -1.0, 0.0, 4)) and high == pytest.approx((1.1, 1.0, 0.0, 4))


BEFORE = ["Loss", "Metric: mean error", "Metric: explained variance", "Probe"]
SPREAD = [
    "Values and their spread",
    "Schedules by parameter group: lr",
    "Schedules by parameter group: weight_decay",
]
FOUND = ["Scout", "Anchored controller", "Evidence of the anchored controller"]
STEERED = [
    "Correction",
    "Signal and velocity: lr",
    "Signal and velocity: weight_decay",
    "Loss across the spread",
]
AFTER = ["Cost of the syncs", "Replicas left out"]


@pytest.mark.parametrize(
    ("has_finder", "titles"),
    [(False, [*BEFORE, *SPREAD, *STEERED, *AFTER]), (True, [*BEFORE, *FOUND, *SPREAD, *AFTER])],
)
def test_charts_of_a_real_run(tmp_path: Path, has_finder: bool, titles: list[str]) -> None:
    one = read_run(write_run(tmp_path / "run", has_finder=has_finder, excludes=True))
    assert [chart.title for chart in all_charts(one)] == titles
    for chart in all_charts(one):
        assert chart.caption and (chart.traces or chart.choices), chart.title
        json.dumps(Pool().add(chart), allow_nan=False)


def test_weights_are_drawn_where_they_differ(tmp_path: Path) -> None:
    records, _ = real_records("paper", 8)
    titles = [chart.title for chart in all_charts(run(*records, config={"controller": "paper"}))]
    assert "Weights of the replicas" in titles and "Correction" not in titles


def test_an_empty_run_has_no_charts() -> None:
    assert all_charts(run()) == []
    assert all_charts(run(record())) == []


def test_base_values_of_the_charts_are_those_of_the_records() -> None:
    records, _ = real_records()
    chart = next(c for c in all_charts(run(*records)) if c.title == "Values and their spread")
    base = next(t for t in chart.choices[0].traces if t["name"] == "base")
    assert base["x"] == list(range(1, 301))
    assert base["y"] == [v for r in records for v in r.base_trace["lr.embedding"]]


def test_records_that_only_look_right_do_no_harm() -> None:
    huge, nan = 1e308, math.nan
    odd = [
        record(1, losses=[huge, huge, huge], probes=[nan], weights=[0.1, nan, 0.3], milliseconds={"x": huge}),
        record(2, losses=[nan, None], positions={"lr": [nan, 1.0]}, multipliers={"lr": [0.0, huge]}),
        record(
            3, losses=[], values={"lr": []}, base={"lr": nan}, correction={"lr": 0.0}, signal={"lr": math.inf}
        ),
        record(
            4, base_trace={"lr": [1.0] * 5}, num_steps=2**40, multipliers={"lr": [1.0]}, excluded={99: "why"}
        ),
        RoundRecord(round=0, step=5, num_replicas=10**12, velocity={"": 1.0}, base={"": 1.0, ".": 2.0}),
    ]
    for chart in [*all_charts(run(*odd)), *comparison_charts([run(*odd)] * 2, 100)]:
        json.dumps(Pool().add(chart), allow_nan=False)


def test_many_replicas_are_drawn_as_a_band_and_some_lines() -> None:
    places = [-1 + r / 31.5 for r in range(64)]
    spread = {"positions": {"lr": places}, "multipliers": {"lr": [1 + p / 9 for p in places]}}
    chart, *_ = all_charts(run(*(record(i, losses=places, **spread) for i in range(1, 4))))
    names = [trace["name"] for trace in chart.choices[0].traces]
    assert len(names) == 2 + 16 + 1 and names[-1] == "training loss of the replicas (16 of 64)"
    assert "training loss, position -1.00" in names and "training loss, position +1.00" in names


def test_what_plotly_would_take_for_markup_is_neutral() -> None:
    chart = Chart(
        title="", caption="", traces=[line([1], [2], "<b>&x</b>", "--accent")], y_title="<a href=x>"
    )
    pool = Pool()
    data = pool.add(chart)
    assert json.loads(pool.texts[data["traces"][0]["name"]["pool"]]) == "&lt;b&gt;&amp;x&lt;/b&gt;"
    assert data["y_title"] == "&lt;a href=x&gt;"


def test_shared_numbers_are_written_once() -> None:
    x = [float(i) for i in range(50)]
    pool = Pool()
    data = pool.add(
        Chart(title="", caption="", traces=[line(x, x, "a", "--accent"), line(x, [math.nan] * 50, "b", "")])
    )
    assert data["traces"][0]["x"] == data["traces"][0]["y"] == data["traces"][1]["x"]
    assert sum(text.startswith("[0,1,2") for text in pool.texts) == 1


def test_the_best_run_is_marked_if_losses_can_be_compared() -> None:
    runs = [run(result={"final_loss": loss}, config={"task": "feed"}) for loss in (0.5, 0.4, 0.6)]
    head, rows = comparison_table([*runs, run(config={"task": "feed"})])
    column = head.index("held-out loss")
    assert [row[column].is_best for row in rows] == [False, True, False, False]
    _, rows = comparison_table([*runs, run(result={"final_loss": 0.1}, config={"task": "digits"})])
    assert not any(cell.is_best for row in rows for cell in row)

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import hdet
from hdet.lab.page import Evaluation, Run, read_run
from hdet.lab.page.chart import Chart, dots, line, thin
from hdet.lab.page.loss_charts import loss_charts, metric_charts
from hdet.lab.page.method_charts import (
    averaging_charts,
    cost_charts,
    look_charts,
    rate_charts,
    said_charts,
    signal_charts,
    value_charts,
)
from hdet.lab.page.run_comparison import comparison_charts, comparison_table
from hdet.lab.page.run_numbers import base_series, plan_series, value_series
from hdet.lab.page.run_report import CHARTS
from hdet.records import RoundRecord
from hdet.round_record import ComparingRecord, ThermostatRecord, WeightDecayRecord
from tests.helpers.runs import real_records, write_run


def record(step: int = 10, **more: Any) -> RoundRecord:
    return RoundRecord(round=0, step=step, num_replicas=2, **more)


def run(*records: RoundRecord, **more: Any) -> Run:
    return Run(path=Path("a"), name="a", records=list(records), **more)


def shown(charts: Iterable[Chart]) -> list[Chart]:
    """Charts that have a point, each of which can be written."""
    found = [chart for chart in charts if any(trace["x"] for trace in chart.traces)]
    for chart in found:
        json.dumps(chart.data(2000), allow_nan=False)
    return found


def all_charts(one: Run) -> list[Chart]:
    return shown(chart for functions in CHARTS.values() for charts in functions for chart in charts(one))


def test_thinning_keeps_the_ends_and_the_extremes() -> None:
    column: list[float | None] = [math.sin(i / 50) for i in range(10_000)]
    column[4321], column[77] = 9.0, None
    kept = thin([column, [0.0] * 10_000], 100)
    assert len(kept) <= 100 and kept[0] == 0 and kept[-1] == 9999 and 4321 in kept


def test_thinning_survives_gaps() -> None:
    assert thin([[None] * 100], 10) and thin([], 10) == [] and thin([[math.nan] * 50, [math.inf] * 50], 10)


def test_a_chart_is_thinned_with_all_that_belongs_to_its_points() -> None:
    points = [(i, 9.0 if i == 123 else 0.0, f"at {i}") for i in range(1000)]
    other = line([i for i, *_ in points], [float(i) for i in range(1000)], "b", "--accent")
    bars = {"array": [float(i) for i in range(1000)]}
    chart = Chart(title="", caption="", traces=[dots(points, "a", "--accent", error_y=bars), other])
    first, second = chart.data(20)["traces"]
    assert first["x"] == second["x"] == second["y"] == first["error_y"]["array"] and len(first["x"]) <= 20
    assert first["customdata"] == [f"at {i}" for i in first["x"]] and 999 in first["x"]


def test_the_base_has_a_point_per_step() -> None:
    one = run(
        record(3, num_steps=3, base_trace={"lr": [1.0, 2.0, 3.0]}),
        record(6, num_steps=3, base_trace={"lr": [4.0]}),
    )
    assert base_series(one, "lr") == ([1, 2, 3, 4, 6], [1.0, 2.0, 3.0, 4.0, 4.0])
    assert base_series(run(record(3, base={"lr": 5.0})), "lr") == ([3], [5.0])


@pytest.mark.parametrize(
    ("values", "limits"),
    [([1.0, 3.0], (([1, 2], [0.5, 1.0]), ([1, 2], [1.5, 3.0]))), ([2.0, 2.0], (([], []), ([], [])))],
)
def test_the_fan_is_around_the_base_of_every_step(values: list[float], limits: tuple) -> None:
    factors = {"lr": [value / 2 for value in values]}
    trace = {"lr": [1.0, 2.0]}
    one = run(record(2, num_steps=2, base_trace=trace, multipliers=factors, values={"lr": values}))
    assert (value_series(one, "lr", min), value_series(one, "lr", max)) == limits


def test_the_fan_of_a_momentum_is_one_of_its_complement() -> None:
    factors, values = {"m": [0.5, 1.5]}, {"m": [0.95, 0.85]}
    one = run(record(1, num_steps=1, base_trace={"m": [0.9]}, multipliers=factors, values=values))
    low, high = (value_series(one, "m", choose)[1] for choose in (min, max))
    assert (low[0], high[0]) == pytest.approx((0.85, 0.95))


def test_the_plan_is_the_base_without_the_correction() -> None:
    more = {"num_steps": 2, "correction": {"lr": 2.0}}
    first = record(2, base_trace={"lr": [1.0, 2.0], "lr[1]": [5.0]}, base={"lr": 6.0, "lr[1]": 8.0}, **more)
    second = record(4, base_trace={"lr": [6.0, 8.0], "lr[1]": [10.0]}, base={"lr": 9.0}, **more)
    assert plan_series(run(first, second), "lr") == ([1, 2, 2, 4], [1.0, 2.0, 3.0, 4.5])
    assert plan_series(run(first, second), "lr[1]") == ([1, 2, 2], [5.0, 5.0, 4.0])
    assert plan_series(run(record(base={"lr": 3.0}, correction={"lr": 1.0})), "lr") == ([], [])


def test_the_plan_of_a_run_that_the_guard_lowered_has_the_peak_that_was_found(tmp_path: Path) -> None:
    one = read_run(write_run(tmp_path / "run", controllers=("guard",)))
    planned, used = (dict(zip(*f(one, "lr.head"), strict=True)) for f in (plan_series, base_series))
    assert one.search is not None and max(planned.values()) == pytest.approx(one.search.found, rel=0.01)
    assert planned[155] == pytest.approx(used[155]) and planned[160] == pytest.approx(3 * used[161])


def rates(one: Run) -> Chart:
    (chart,) = rate_charts(one)
    return chart


def test_the_learning_rate_is_drawn_as_planned_and_as_used(tmp_path: Path) -> None:
    chart = rates(read_run(write_run(tmp_path / "run", controllers=("guard",))))
    planned, used, brakes = chart.traces
    assert [trace["name"] for trace in chart.traces] == ["planned", "learning rate", "guard went back"]
    assert planned["x"][-1] == len(used["x"]) == 300 and brakes["x"] == [160]
    assert brakes["y"] == [used["y"][159]] and "guard went back" in chart.caption


def traced(**rates: float) -> Run:
    return run(record(2, num_steps=2, base_trace={f"lr.{name}": [value] for name, value in rates.items()}))


def test_equal_learning_rates_share_a_line() -> None:
    equal = rates(traced(embedding=0.1, non_embedding=0.1))
    assert [t["name"] for t in equal.traces] == ["learning rate"] and equal.is_log is False
    parted = rates(traced(embedding=0.1, head=0.1, bias=0.001))
    assert [t["name"] for t in parted.traces] == ["lr.embedding, lr.head", "lr.bias"] and parted.is_log


@pytest.mark.parametrize(("plans", "num"), [((0.1, 0.1), 1), ((0.1, 0.2), 2)])
def test_equal_plans_share_a_line(plans: tuple[float, ...], num: int) -> None:
    factors = {f"lr.{i}": 2.0 + i for i in range(2)}
    trace = {f"lr.{i}": [plan] for i, plan in enumerate(plans)}
    base = {f"lr.{i}": plan * (2.0 + i) for i, plan in enumerate(plans)}
    more: dict[str, Any] = {"num_steps": 1, "base": base, "correction": factors}
    later = {name: [value] for name, value in base.items()}
    one = run(record(1, base_trace=trace, **more), record(2, base_trace=later, **more))
    assert [trace["name"] for trace in rates(one).traces].count("planned") == num


@pytest.mark.parametrize(("loss", "is_log"), [(4.0, False), (6.0, True)])
def test_a_loss_that_jumped_does_not_flatten_the_others(loss: float, is_log: bool) -> None:
    (chart,) = loss_charts(run(record(losses=[loss, None]), evaluations=[Evaluation(10, 1.0)]))
    assert chart.is_log is is_log


def test_without_a_spread_there_is_one_training_loss() -> None:
    records = [record(i, losses=[1.0, 2.0], multipliers={"lr": [1.0, 1.0]}) for i in (1, 2)]
    (chart,) = loss_charts(run(*records))
    assert [(t["name"], t["y"]) for t in chart.traces if t["x"]] == [("training loss", [1.5, 1.5])]
    assert shown(said_charts(run(*records))) == []


def test_a_metric_is_explained() -> None:
    measured = [Evaluation(10 * i, 0.5, {"ne": ne, "auc": 0.5}) for i, ne in enumerate([3.0, 1.0, 0.8])]
    entropy, area = metric_charts(run(evaluations=measured, config={"metric_notes": {"ne": "a share"}}))
    assert entropy.caption == "Measured on held-out data. ne is a share."
    assert area.caption == "Measured on held-out data."
    assert len(shown(metric_charts(run(evaluations=measured[:1], config={"metric_notes": 3})))) == 2


def test_the_cost_of_a_sync_is_stacked_by_what_it_was_spent_on() -> None:
    (chart,) = cost_charts(
        run(*(record(7 * i, milliseconds={"measure": i, "steer": 2.0}) for i in range(41)))
    )
    assert [(t["name"], t["y"][-1], t["x"][-1]) for t in chart.traces] == [
        ("measure", 40, 280), ("steer", 2.0, 280),
    ]  # fmt: skip
    assert {t["stackgroup"] for t in chart.traces} == {"cost"}


def test_the_band_is_drawn_around_the_base() -> None:
    spread: dict[str, Any] = {"multipliers": {"lr": [0.5, 1.5]}, "num_steps": 2}
    first = record(2, base_trace={"lr": [1.0, 2.0]}, values={"lr": [1.0, 3.0]}, **spread)
    second = record(4, base_trace={"lr": [2.0, 1.0]}, values={"lr": [1.5, 0.5]}, **spread)
    chart = rates(run(first, second))
    low, high, base = chart.traces
    assert (low["y"], high["y"]) == ([0.5, 1.0, 1.0, 0.5], [1.5, 3.0, 3.0, 1.5])
    assert base["y"] == [1.0, 2.0, 2.0, 1.0]
    assert chart.caption == "Each replica used a value of its own within the band. The line is the base."


def test_losses_are_drawn_against_values() -> None:
    spread: dict[str, Any] = {"multipliers": {"lr": [0.8, 1.2]}, "values": {"lr": [0.08, 0.12]}}
    (chart,) = said_charts(run(*(record(10 * i, losses=[2.0 + i % 2, 1.0], **spread) for i in range(1, 25))))
    (means,) = chart.traces
    assert means["x"] == pytest.approx([0.8, 1.2]) and means["y"] == pytest.approx([0.75, -0.75])
    assert chart.caption.startswith("Higher lr did better in 24 of 24 rounds. Signal over noise of lr: ")


def test_an_explored_value_is_drawn_with_its_fan() -> None:
    spread: dict[str, Any] = {"multipliers": {"wd": [0.5, 1.5]}, "values": {"wd": [0.1, 0.3]}}
    (chart,) = value_charts(
        run(*(record(i, num_steps=1, base_trace={"wd": [0.2]}, **spread) for i in (1, 2)))
    )
    assert chart.title == "Wd" and chart.traces[1]["y"] == pytest.approx([0.3] * 2)


def test_looks_at_held_out_data_are_drawn_with_their_errors() -> None:
    looks = [WeightDecayRecord(slope=slope, slope_error=0.25) for slope in (-1.5, 0.5, math.nan)]
    bases = {"weight_decay": 0.2}
    records = [
        record(10 * i, base=bases, controllers={"weight_decay": look})
        for i, look in enumerate(looks, start=1)
    ]
    (chart,) = look_charts(run(*records))
    (means,) = chart.traces
    assert (means["x"], means["y"]) == ([10, 20], [-1.5, 0.5])  # a slope that is no number is left out
    assert means["error_y"]["array"] == [0.5, 0.5]
    assert chart.caption.endswith("At the end it is not clear whether smaller weights would help.")


def test_the_signal_is_drawn_with_its_running_mean() -> None:
    told = [ComparingRecord(signal={"lr": x}, velocity={"lr": x / 10}) for x in (1.0, -1.0)]
    records = [record(10 * i, controllers={"comparing": one}) for i, one in enumerate(told, start=1)]
    (chart,) = signal_charts(run(*records))
    assert chart.title == "Signal and velocity: lr"
    assert [(t["name"], t["y"]) for t in chart.traces] == [
        ("lr, signal", [1.0, -1.0]), ("lr, velocity", [0.1, -0.1]),
    ]  # fmt: skip


COMPARED = [
    "Learning rate", "What the replicas said", "Loss",
    "Signal and velocity: lr", "Signal and velocity: weight_decay", "Weight decay",
    "Fan-out and converge (figure 1)", "Learning rate of embedding (figure 3)",
    "Learning rate of head (figure 3)", "Learning rate of bias (figure 3)",
    "Metric: mean error", "Metric: explained variance", "Cost of the syncs", "Replicas left out and healed",
]  # fmt: skip
GUARDED = [
    "Search for the learning rate", "Learning rate", "Loss", "Metric: mean error",
    "Metric: explained variance", "Cost of the syncs", "Replicas left out and healed",
]  # fmt: skip


@pytest.mark.parametrize(
    ("controller", "titles"), [("log", COMPARED), ("paper", COMPARED), ("guard", GUARDED)]
)
def test_charts_of_a_real_run(tmp_path: Path, controller: str, titles: list[str]) -> None:
    one = read_run(write_run(tmp_path / "run", controllers=(controller,), excludes=True))
    assert [chart.title for chart in all_charts(one)] == titles
    assert all(chart.caption for chart in all_charts(one))


def test_an_empty_run_has_no_charts() -> None:
    assert all_charts(run()) == []
    assert all_charts(run(record())) == []


def test_base_values_of_the_charts_are_those_of_the_records() -> None:
    records, _ = real_records()
    chart = rates(run(*records))
    base = next(t for t in chart.traces if t["name"].startswith("lr.embedding"))
    assert base["x"] == list(range(1, 301))
    assert base["y"] == [v for r in records for v in r.base_trace["lr.embedding"]]


def test_records_that_only_look_right_do_no_harm() -> None:
    huge, nan = 1e308, math.nan
    told = ComparingRecord(signal={"lr": math.inf}, velocity={"lr": nan, "": 1.0}, weights=[nan])
    odd = [
        record(1, losses=[huge, huge, huge], probes=[nan], milliseconds={"x": huge}),
        record(2, losses=[nan, None], positions={"lr": [nan, 1.0]}, multipliers={"lr": [0.0, huge]}),
        record(
            3, values={"lr": []}, base={"lr": nan}, correction={"lr": 0.0}, controllers={"comparing": told}
        ),
        record(
            4, base_trace={"lr": [1.0] * 5}, num_steps=2**40, multipliers={"lr": [1.0]}, excluded={99: "why"}
        ),
        RoundRecord(round=0, step=5, num_replicas=10**12, base={"": 1.0, ".": 2.0}),
    ]
    assert all_charts(run(*odd)) and shown(comparison_charts([run(*odd)] * 2))


def test_what_plotly_would_take_for_markup_is_neutral() -> None:
    traces = [line([1], [2], "<b>&x</b>%{y}", "--accent")]
    data = Chart(title="", caption="", traces=traces, y_title="<a href=x>").data(100)
    assert data["traces"][0]["name"] == "&lt;b&gt;&amp;x&lt;/b&gt;&#37;{y}"
    assert data["y_title"] == "&lt;a href=x&gt;"


def swept(**losses: float | None) -> list[Run]:
    """Runs of a sweep, by ten to the power of minus this."""
    return [
        run(
            config={"task": "digits", "lr": 10.0 ** -int(name[1:])},
            result={"final_loss": loss, "status": "failed" if loss is None else "finished"},
            evaluations=[Evaluation(0, 2.0), Evaluation(10, loss)],
        )
        for name, loss in losses.items()
    ]


def test_a_sweep_has_its_curve_and_one_bad_run_does_not_flatten_it() -> None:
    charts = {c.title: c for c in comparison_charts(swept(_1=1e6, _2=0.2, _3=0.1, _4=0.3, _5=None))}
    curve = charts["Loss against learning rate"]
    runs, bad = curve.traces
    assert (runs["x"], runs["y"]) == (pytest.approx([1e-4, 1e-3, 1e-2]), [0.3, 0.1, 0.2])
    assert runs["mode"] == "lines+markers"
    assert bad["x"] == pytest.approx([1e-5, 0.1])
    assert [said.strip() for said in bad["customdata"]] == ["a, loss not finite", "a, loss 1e6"]
    for chart in (curve, charts["Held-out loss"]):  # the untrained loss is 2 and the best 0.1
        low, high = chart.layout["yaxis"]["range"]
        assert -0.2 < low < 0.1 and 2.3 < high < 2.7


def test_without_a_bad_run_a_sweep_shows_all_of_it() -> None:
    charts = {c.title: c for c in comparison_charts(swept(_1=0.5, _2=0.2, _3=0.1))}
    assert len([trace for trace in charts["Loss against learning rate"].traces if trace["x"]]) == 1
    assert charts["Held-out loss"].layout == {}


def test_runs_that_found_their_learning_rates_share_no_line() -> None:
    runs = swept(_1=0.5, _2=0.2)
    runs[0].records = [record(controllers={"comparing": ComparingRecord(signal={"lr": 1.0})})]
    assert next(iter(comparison_charts(runs))).traces[0]["mode"] == "markers"


def test_the_best_run_is_marked_if_losses_can_be_compared() -> None:
    runs = [run(result={"final_loss": loss}, config={"task": "feed"}) for loss in (0.5, 0.4, 0.6)]
    head, rows = comparison_table([*runs, run(config={"task": "feed"})])
    column = head.index("held-out loss")
    assert [row[column].is_best for row in rows] == [False, True, False, False]
    _, rows = comparison_table([*runs, run(result={"final_loss": 0.1}, config={"task": "digits"})])
    assert not any(cell.is_best for row in rows for cell in row)


def test_what_averaging_gains_is_drawn_beside_what_is_right() -> None:
    told = ThermostatRecord(averaging_gains=[None, 0.1], time_gains=[None, 0.5])
    later = ThermostatRecord(averaging_gains=[0.2], time_gains=[-1.0], factors=[0.5])
    one = run(record(10, controllers={"thermostat": told}), record(20, controllers={"thermostat": later}))
    (chart,) = averaging_charts(one)
    averaging, right = chart.traces
    assert (averaging["x"], averaging["y"]) == ([10, 20], [0.1, 0.2])
    assert right["y"] == [pytest.approx(0.5 * hdet.Thermostat().target), 0.0]

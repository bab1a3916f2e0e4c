import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

import hdet
from hdet.lab.page import Evaluation, Run, read_run
from hdet.lab.page.chart import Chart, Pool, line, thin
from hdet.lab.page.loss_charts import loss_charts, metric_charts, search_charts
from hdet.lab.page.replica_charts import controller_charts, health_charts, said_charts, said_over_run_charts
from hdet.lab.page.run_comparison import comparison_charts, comparison_metric_charts, comparison_table
from hdet.lab.page.run_numbers import base_series, fan_limits, plan_series
from hdet.lab.page.sentences import sentence
from hdet.lab.page.value_charts import rate_charts, value_charts
from hdet.records import RoundRecord
from tests.helpers.runs import real_records, write_run


def record(step: int = 10, **more: Any) -> RoundRecord:
    return RoundRecord(round=0, step=step, num_replicas=2, **more)


def run(*records: RoundRecord, **more: Any) -> Run:
    return Run(path=Path("a"), name="a", records=list(records), **more)


def all_charts(one: Run, max_points: int = 2000) -> list[Chart]:
    parts = (
        rate_charts,
        loss_charts,
        said_over_run_charts,
        said_charts,
        value_charts,
        controller_charts,
        metric_charts,
        health_charts,
    )
    return [*search_charts(one), *(chart for part in parts for chart in part(one, max_points))]


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


@pytest.mark.parametrize(
    ("values", "limits"), [([1.0, 3.0], ([1, 2], [0.5, 1.0], [1.5, 3.0])), ([2.0, 2.0], ([], [], []))]
)
def test_the_fan_is_around_the_base_of_every_step(values: list[float], limits: tuple) -> None:
    factors = {"lr": [value / 2 for value in values]}
    trace = {"lr": [1.0, 2.0]}
    one = run(record(2, num_steps=2, base_trace=trace, multipliers=factors, values={"lr": values}))
    assert fan_limits(one, "lr") == limits


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
    held = run(first, second, config={"controllers": ("paper",)})
    assert plan_series(held, "lr") == ([1, 2, 2, 4], [1.0, 2.0, 3.0, 4.5])
    assert plan_series(run(record(base={"lr": 3.0}, correction={"lr": 1.0})), "lr") == ([], [])
    moved = [
        dataclasses.replace(one, thermostat_factors=[1.5]) for one in (first, second)
    ]  # somewhere within a round
    assert plan_series(run(*moved), "lr") == ([1, 2, 2, 4], [1.0, 2.0, 3.0, 4.5])


def test_the_plan_of_a_run_that_the_guard_lowered_has_the_peak_that_was_found(tmp_path: Path) -> None:
    one = read_run(write_run(tmp_path / "run", controllers=("guard",)))
    planned, used = (dict(zip(*f(one, "lr.head"), strict=True)) for f in (plan_series, base_series))
    assert one.search is not None and max(planned.values()) == pytest.approx(one.search.found)
    assert planned[160] == used[160] and planned[161] == pytest.approx(3 * used[161])


def rates(one: Run) -> Chart:
    (chart,) = rate_charts(one, 2000)
    return chart


def test_the_learning_rate_is_drawn_as_planned_and_as_used(tmp_path: Path) -> None:
    chart = rates(read_run(write_run(tmp_path / "run", controllers=("guard",))))
    planned, used, brakes = chart.traces
    assert [trace["name"] for trace in chart.traces] == [
        "planned", "learning rate", "guard went back",
    ]  # fmt: skip
    assert len(planned["x"]) == len(used["x"]) == 300 and brakes["x"] == [160]
    assert brakes["y"] == [used["y"][159]] and "guard went back" in chart.caption


def test_equal_learning_rates_share_a_line() -> None:
    def traced(**rates: float) -> Run:
        names = {f"lr.{name}": [value] for name, value in rates.items()}
        return run(record(2, num_steps=2, base_trace=names))

    equal = rates(traced(embedding=0.1, non_embedding=0.1))
    assert [t["name"] for t in equal.traces] == ["learning rate"] and equal.is_log is False
    assert equal.caption == "Every step used the learning rate that was planned."
    parted = rates(traced(embedding=0.1, head=0.1, bias=0.001))
    assert [t["name"] for t in parted.traces] == ["lr.embedding, lr.head", "lr.bias"] and parted.is_log


@pytest.mark.parametrize(("loss", "is_log"), [(4.0, False), (6.0, True)])
def test_a_loss_that_jumped_does_not_flatten_the_others(loss: float, is_log: bool) -> None:
    (chart,) = loss_charts(run(record(losses=[loss, None]), evaluations=[Evaluation(10, 1.0)]), 2000)
    assert chart.is_log is is_log


def test_a_held_out_loss_that_jumped_does_not_flatten_the_others() -> None:
    found = [Evaluation(i, loss) for i, loss in enumerate((2.0, 1.0, 50.0, 1.0, 0.9))]
    (chart,) = loss_charts(run(evaluations=found), 2000)
    assert chart.is_log
    (chart,) = loss_charts(run(evaluations=[e for e in found if e.loss != 50.0]), 2000)
    assert not chart.is_log


def test_equal_plans_share_a_line() -> None:
    def traced(*plans: float) -> Run:
        names = [f"lr.{i}" for i in range(len(plans))]
        first = {name: [plan] for name, plan in zip(names, plans, strict=True)}
        factors = {name: 2.0 + i for i, name in enumerate(names)}
        second = {name: [plan * factors[name]] for name, plan in zip(names, plans, strict=True)}
        return run(
            record(1, num_steps=1, base_trace=first, correction=factors),
            record(2, num_steps=1, base_trace=second, correction=factors),
        )

    names = [trace["name"] for trace in rates(traced(0.1, 0.1, 0.1)).traces]
    assert names == ["planned", "lr.0", "lr.1", "lr.2"]  # the plans are equal
    names = [trace["name"] for trace in rates(traced(0.1, 0.1, 0.2)).traces]
    assert names == ["planned", "planned", "lr.0", "lr.1", "lr.2"]


def test_without_a_spread_there_is_one_training_loss() -> None:
    records = [record(i, losses=[1.0, 2.0], multipliers={"lr": [1.0, 1.0]}) for i in (1, 2)]
    (chart,) = loss_charts(run(*records), 2000)
    assert [(t["name"], t["y"]) for t in chart.traces] == [("training loss", [1.5, 1.5])]
    assert list(said_charts(run(*records), 2000)) == list(said_over_run_charts(run(*records), 2000)) == []


def test_a_metric_is_explained_and_not_flattened_by_its_first_value() -> None:
    measured = [Evaluation(10 * i, 0.5, {"ne": ne, "auc": 0.5}) for i, ne in enumerate([3.0, 1.0, 0.8])]
    entropy, area = metric_charts(run(evaluations=measured, config={"metric_notes": {"ne": "a share"}}), 2000)
    assert entropy.layout["yaxis"]["range"] == pytest.approx([0.79, 1.01])
    assert entropy.caption == (
        "Measured on held-out data. ne is a share. The first values are far off, and cut off."
    )
    assert area.layout == {} and area.caption == "Measured on held-out data."
    odd, _ = metric_charts(run(evaluations=measured[:1], config={"metric_notes": 3}), 2000)
    assert odd.layout == {}


def test_the_cost_of_a_sync_is_stacked_by_what_it_was_spent_on() -> None:
    timed = [record(7 * i, milliseconds={"steer": 2.0, "measure": i}) for i in range(1, 41)]
    (chart,) = health_charts(run(*timed), 2000)
    assert [(t["name"], t["y"][-1], t["x"][-1]) for t in chart.traces] == [
        ("measure", 40, 280), ("steer", 2.0, 280),
    ]  # fmt: skip
    assert {t["stackgroup"] for t in chart.traces} == {"cost"}


def test_the_band_and_the_syncs_are_drawn_around_the_base() -> None:
    spread: dict[str, Any] = {"multipliers": {"lr": [0.5, 1.5]}, "num_steps": 2}
    first = record(2, base_trace={"lr": [1.0, 2.0]}, values={"lr": [1.0, 3.0]}, **spread)
    second = record(4, base_trace={"lr": [2.0, 1.0]}, values={"lr": [1.5, 0.5]}, **spread)
    chart = rates(run(first, second))
    low, high, base, syncs = chart.traces
    assert (low["y"], high["y"]) == ([0.5, 1.0, 1.0, 0.5], [1.5, 3.0, 3.0, 1.5])
    assert base["y"] == [1.0, 2.0, 2.0, 1.0] and (syncs["x"], syncs["y"]) == ([2, 4], [2.0, 1.0])
    assert chart.caption == (
        "Each replica used a value of its own within the band. The line is the base. "
        "The replicas were averaged at 2 syncs."
    )


def test_losses_are_drawn_against_values_with_their_slope() -> None:
    spread: dict[str, Any] = {"multipliers": {"lr": [0.8, 1.2]}, "values": {"lr": [0.08, 0.12]}}
    records = [record(10 * i, losses=[2.0 + i % 2, 1.0], **spread) for i in range(1, 25)]
    (against,), (over_run,) = (charts(run(*records), 2000) for charts in (said_charts, said_over_run_charts))
    dots, fitted = against.traces
    assert dots["x"] == pytest.approx([0.8, 1.2]) and dots["y"] == pytest.approx([0.75, -0.75])
    assert fitted["y"] == pytest.approx([0.75, -0.75])
    assert against.caption.startswith(
        "Higher lr did better (in 24 of 24 rounds). Slope of the loss on the log of lr: -3.7 ± 0.3."
    )
    (line,) = over_run.traces
    assert line["x"] == list(range(20, 241, 20)) and line["y"] == pytest.approx([-1.5] * 12)
    assert line["error_y"]["array"] == pytest.approx([1.0] * 12)


def test_an_explored_value_says_what_the_probe_said() -> None:
    spread: dict[str, Any] = {"multipliers": {"wd": [0.5, 1.5]}, "values": {"wd": [0.1, 0.3]}}
    spread["base_trace"] = {"wd": [0.2]}
    records = [record(i, num_steps=1, losses=[9.0, 1.0], probes=[1.0, 1.5], **spread) for i in range(1, 13)]
    (chart,) = value_charts(run(*records), 2000)
    assert chart.title == "wd over the run" and chart.traces[1]["y"] == pytest.approx([0.3] * 12)
    assert chart.caption.endswith("Lower wd did better (in 12 of 12 rounds).")


def test_looks_at_held_out_data_are_drawn_with_their_errors() -> None:
    told: dict[str, Any] = {"num_steps": 10, "signal": {"<wd>": 0.1}, "slope_error": {"<wd>": 0.25}}
    values = ((-1.5, 0.2), (0.5, 0.2), (math.nan, 0.2))
    records = [
        record(10 * i, slope={"<wd>": slope}, base={"<wd>": base}, base_trace={"<wd>": [base]}, **told)
        for i, (slope, base) in enumerate(values, start=1)
    ]
    decay, slopes = all_charts(run(*records))[-2:]
    # It is drawn though it stayed where it was.
    assert decay.title == "<wd> over the run" and decay.is_log and set(decay.traces[-1]["y"]) == {0.2}
    assert "Held-out data left the <wd> at 0.2 (2 looks)." in decay.caption
    zero, dots = slopes.traces
    assert (dots["x"], dots["y"]) == ([10, 20], [-1.5, 0.5])  # a slope that is no number is left out
    assert dots["error_y"]["array"] == [0.5, 0.5]
    assert (zero["x"], zero["y"]) == ([10, 20], [0.0, 0.0])
    assert "Below zero smaller weights would score better, and <wd> is added." in slopes.caption
    assert "looks whose bars include zero still move it a little" in slopes.caption
    assert "it is not clear whether smaller weights would help" in slopes.caption.lower()
    assert "<wd>" not in json.dumps([Pool().add(chart) for chart in (decay, slopes)])
    assert not any("Signal" in chart.title for chart in all_charts(run(*records)))


COMPARED = [
    "Learning rate over the run", "Loss",
    "What the replicas said", "Losses of the replicas against their values",
    "weight_decay over the run", "Signal and velocity: lr", "Signal and velocity: weight_decay",
    "Metric: mean error", "Metric: explained variance", "Cost of the syncs", "Replicas left out and healed",
]  # fmt: skip
GUARDED = [
    "Search for the learning rate", "Learning rate over the run", "Loss", "Metric: mean error",
    "Metric: explained variance", "Cost of the syncs", "Replicas left out and healed",
]  # fmt: skip


@pytest.mark.parametrize(("controller", "titles"), [("log", COMPARED), ("guard", GUARDED)])
def test_charts_of_a_real_run(tmp_path: Path, controller: str, titles: list[str]) -> None:
    one = read_run(write_run(tmp_path / "run", controller=controller, excludes=True))
    assert [chart.title for chart in all_charts(one)] == titles
    for chart in all_charts(one):
        assert chart.caption and chart.traces, chart.title
        json.dumps(Pool().add(chart), allow_nan=False)


def test_weights_are_drawn_where_they_differ(tmp_path: Path) -> None:
    records, _ = real_records("paper", 8)
    titles = [chart.title for chart in all_charts(run(*records, config={"controllers": ("paper",)}))]
    assert "Weights of the replicas" in titles


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
    charts = {c.title: c for c in comparison_charts(swept(_1=1e6, _2=0.2, _3=0.1, _4=0.3, _5=None), 2000)}
    curve = charts["Loss against learning rate"]
    runs, best, bad = curve.traces
    assert (runs["x"], runs["y"]) == (pytest.approx([1e-4, 1e-3, 1e-2]), [0.3, 0.1, 0.2])
    assert runs["mode"] == "lines+markers" and (best["x"], best["y"]) == (pytest.approx([1e-3]), [0.1])
    assert bad["x"] == pytest.approx([1e-5, 0.1]) and bad["customdata"] == [
        "a, loss not finite", "a, loss 1e6",
    ]  # fmt: skip
    for chart in (curve, charts["Held-out loss"]):  # the untrained loss is 2 and the best 0.1
        low, high = chart.layout["yaxis"]["range"]
        assert -0.2 < low < 0.1 and 2.3 < high < 2.7


@pytest.mark.parametrize(("good", "bad", "first"), [(0.9, -40.0, 0.1), (2.5, 90.0, 7.0)])
def test_one_bad_run_does_not_flatten_a_metric_that_rises_or_falls(good, bad, first) -> None:
    def one(last: float) -> Run:
        return run(
            evaluations=[Evaluation(0, 2.0, metrics={"m": first}), Evaluation(10, 1.0, metrics={"m": last})]
        )

    (chart,) = comparison_metric_charts([one(good), one(good), one(bad)], 2000)
    low, high = chart.layout["yaxis"]["range"]
    assert low < min(good, first) < max(good, first) < high and not low < bad < high
    assert "far worse" in chart.caption
    (chart,) = comparison_metric_charts([one(good), one(good)], 2000)
    assert chart.layout == {} and "far worse" not in chart.caption


def test_what_all_runs_share_is_said_once() -> None:
    runs = [run(config={"controllers": ()}, result={"status": s}) for s in ("finished", "failed")]
    head, _, shared = comparison_table(runs)
    assert shared["controller"] == "none" and "status" not in shared
    assert "controller" not in head and "status" in head


def test_without_a_bad_run_a_sweep_shows_all_of_it() -> None:
    charts = {c.title: c for c in comparison_charts(swept(_1=0.5, _2=0.2, _3=0.1), 2000)}
    assert len(charts["Loss against learning rate"].traces) == 2
    assert charts["Held-out loss"].layout == {}


def test_the_best_run_is_marked_if_losses_can_be_compared() -> None:
    runs = [run(result={"final_loss": loss}, config={"task": "feed"}) for loss in (0.5, 0.4, 0.6)]
    head, rows, _ = comparison_table([*runs, run(config={"task": "feed"})])
    column = head.index("held-out loss")
    assert [row[column].is_best for row in rows] == [False, True, False, False]
    _, rows, _ = comparison_table([*runs, run(result={"final_loss": 0.1}, config={"task": "digits"})])
    assert not any(cell.is_best for row in rows for cell in row)


def test_what_averaging_gains_is_drawn_beside_what_is_right() -> None:
    gains: dict[str, Any] = {"averaging_gains": [None, 0.1], "time_gains": [None, 0.5]}
    told: dict[str, Any] = {"num_steps": 10, "base": {"lr": 0.1}, "base_trace": {"lr": [0.1]}}
    one = run(
        record(10, **told, **gains),
        record(20, **told, averaging_gains=[0.2], time_gains=[-1.0], thermostat_factors=[0.5]),
    )
    assert sentence(one).endswith("The thermostat multiplied the learning rate by 0.5.")
    _, chart = rate_charts(one, 2000)
    averaging, right = chart.traces
    assert chart.title == "What averaging gains"
    assert (averaging["x"], averaging["y"]) == ([10, 20], [0.1, 0.2])
    assert right["y"] == [pytest.approx(0.5 * hdet.Thermostat().target), 0.0]

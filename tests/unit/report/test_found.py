"""What the report makes of the scout's and the anchored controller's records."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hdet.report import Run, read_run, sentence
from hdet.report.chart import Chart, Pool
from hdet.report.finders import finder_charts
from hdet.report.found import Anchored, Scouted, anchored_of, scouted_of
from hdet.telemetry import RoundRecord, ScoutDecision, ScoutRecord
from tests.helpers.runs import real_records, write_run

NAN, INF, HUGE = math.nan, math.inf, 1e308


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A real run with both finders, read from its folder."""
    return read_run(write_run(tmp_path_factory.mktemp("real") / "run", has_finder=True))


@pytest.fixture(scope="module")
def recorded() -> list[RoundRecord]:
    """What that run recorded, before any of it was written."""
    return list(real_records("anchored")[0])


def scouted(run: Run) -> Scouted:
    found = scouted_of(run)
    assert found is not None
    return found


def anchored(run: Run) -> Anchored:
    found = anchored_of(run)
    assert found is not None
    return found


def charts_of(run: Run) -> dict[str, Chart]:
    charts = {chart.title: chart for chart in finder_charts(run, 2000)}
    for chart in charts.values():
        json.dumps(Pool().add(chart), allow_nan=False)
    return charts


def traces_of(chart: Chart) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in chart.traces}


def decision(**more: Any) -> ScoutDecision:
    return ScoutDecision(**({"chosen": 2.0, "low": 1.0, "high": 4.0, "transfer": 0.5, "factor": 1.0} | more))


def fan(step: int = 10, *, decided: ScoutDecision | None = None, **more: Any) -> RoundRecord:
    seen = {"stage": "wide", "peak_lr": 0.1, "factors": [1.0, 2.0, 4.0], "scores": [2.0, 1.0, 3.0]}
    scout = ScoutRecord(**(seen | more), decision=decided)
    return RoundRecord(round=0, step=step, num_replicas=3, ends_round=False, scout=scout)


def sync(step: int, factor: float, z: float = 0.5, **more: Any) -> RoundRecord:
    fields = {"correction": {"lr": factor}, "signal": {"lr": z}}
    return RoundRecord(round=0, step=step, num_replicas=3, **(fields | more))


def run(*records: RoundRecord, **config: Any) -> Run:
    return Run(
        path=Path("a"),
        name="a",
        config={"lr": 0.1, "steps": 100, "controller": "anchored", "scout": True} | config,
        scouting=[record for record in records if record.scout is not None],
        records=[record for record in records if record.scout is None],
    )


def test_the_scout_of_a_real_run_is_what_it_recorded(real: Run, recorded: list[RoundRecord]) -> None:
    fans = [record.scout for record in recorded if record.scout]
    found, last = scouted(real), fans[-1].decision
    assert len(fans) == 4 and last is not None and found.choice is not None
    for mine, theirs in zip(found.fans, fans, strict=True):
        lrs = [theirs.peak_lr * factor for factor in theirs.factors]
        assert mine.stage == theirs.stage
        assert mine.points == list(zip(lrs, theirs.scores, strict=True))
    assert found.choice.lr == 0.01 * last.factor and found.choice.factor == last.factor
    assert found.choice.low == pytest.approx(0.01 * last.low * last.transfer)
    assert found.choice.high == pytest.approx(0.01 * last.high * last.transfer)
    assert found.parabola is not None
    assert found.parabola.center == pytest.approx(math.log(0.01 * last.chosen))


def test_the_path_of_a_real_run_is_what_it_recorded(real: Run, recorded: list[RoundRecord]) -> None:
    rounds = [record for record in recorded if not record.scout]
    last, found = recorded[3].scout, anchored(real)
    assert last is not None and last.decision is not None
    assert found.steps == [record.step for record in rounds]
    assert list(found.factors) == list(found.signals) == ["lr.embedding", "lr.head", "lr.bias"]
    for name, factors in found.factors.items():
        expected = [record.correction[name] / last.decision.factor for record in rounds]
        assert factors == pytest.approx(expected) and factors[0] == pytest.approx(1.0)
        assert found.signals[name] == [record.signal[name] for record in rounds]
    assert len({tuple(factors) for factors in found.factors.values()}) > 1
    assert (found.held_from, found.reason) == (240, "training data repeats")
    assert found.last_factors == [factors[-1] for factors in found.factors.values()]


def test_the_charts_show_what_was_found(real: Run) -> None:
    charts, found = charts_of(real), scouted(real)
    assert list(charts) == ["Scout", "Anchored controller", "Evidence of the anchored controller"]
    traces, choice = traces_of(charts["Scout"]), found.choice
    assert choice is not None
    mark = traces[f"chosen: {choice.lr:.3g}"]
    assert mark["x"] == [choice.lr, choice.lr]
    assert set(traces["likely range"]["x"]) == {choice.low, choice.high}
    first = traces["round 1, from the initial weights"]
    assert list(zip(first["x"], first["y"], strict=True)) == found.fans[0].points
    assert "round 4, from the best trial" in traces
    fitted, narrow = traces["fitted parabola"], [lr for fan in found.fans[2:] for lr, _ in fan.points]
    assert (fitted["x"][0], fitted["x"][-1]) == pytest.approx((min(narrow), max(narrow)))
    assert "The vertical line is the choice" in charts["Scout"].caption
    path = traces_of(charts["Anchored controller"])
    assert list(path) == ["lr.embedding", "lr.head", "lr.bias", "held from step 240"]
    assert path["lr.head"]["y"] == anchored(real).factors["lr.head"]
    assert path["held from step 240"]["x"] == [240, 240]
    caption = charts["Anchored controller"].caption
    assert caption.endswith("From step 240 on it was held: training data repeats.")
    evidence = traces_of(charts["Evidence of the anchored controller"])
    assert evidence["lr.bias"]["y"] == anchored(real).signals["lr.bias"]


def test_the_words_of_a_real_run(real: Run) -> None:
    choice, factors = scouted(real).choice, anchored(real).last_factors
    assert choice is not None and choice.low is not None and choice.high is not None
    assert (
        "Started from a learning rate of 0.01, a scout tried 1e-4 to 1 in 4 rounds and chose "
        f"{choice.lr:.3f} (likely between {choice.low:.2g} and {choice.high:.2g}). From there, the anchored "
        f"controller moved it by factors from {min(factors):.2g} to {max(factors):.2g}, by parameter group. "
        "It was held from step 240 on: training data repeats."
    ) in sentence(real)


def test_by_hand() -> None:
    """Points on a parabola of the logarithm give it back; a failed and a lost trial are marked."""
    factors = [0.5, 1.0, 2.0, 4.0, 8.0, 100.0]
    scores = [1 + 0.3 * math.log(f / 2) ** 2 for f in factors[:-2]] + [None, 50.0]
    end = decision(chosen=2.0, low=1.0, high=4.0, factor=1.0, reason="higher ones were not stable")
    one = run(
        fan(10, factors=[1.0], scores=[1.5]),
        fan(20, stage="narrow", factors=factors, scores=scores, decided=end),
        sync(30, 1.0),
        sync(40, 3.0, num_brakes=2),
    )
    found = scouted(one)
    assert found.choice is not None and found.parabola is not None
    assert (found.choice.lr, found.choice.low, found.choice.high) == pytest.approx((0.1, 0.05, 0.2))
    assert found.parabola.center == pytest.approx(math.log(0.2))
    assert (found.parabola.curvature, found.parabola.minimum) == pytest.approx((0.3, 1.0))
    chart = charts_of(one)["Scout"]
    assert chart.caption.endswith("Note on the choice: higher ones were not stable.")
    traces = traces_of(chart)
    assert traces["round 2, from the best trial: failed"]["x"] == pytest.approx([0.8, 10.0])
    assert traces["fitted parabola"]["x"][0] == pytest.approx(0.05)
    assert anchored(one).factors == {"lr": [1.0, 3.0]} and anchored(one).held_from is None
    assert "moved it by a factor of 3, to 0.3 at its peak. It braked 2 times" in sentence(one)


def test_without_a_scout_the_path_begins_at_the_plan() -> None:
    one = run(sync(10, 1.0), sync(20, 1.5), scout=False)
    assert scouted_of(one) is None and anchored(one).factors == {"lr": [1.0, 1.5]}
    assert list(charts_of(one)) == ["Anchored controller", "Evidence of the anchored controller"]


def test_other_controllers_have_no_path() -> None:
    assert anchored_of(run(sync(10, 1.0), controller="log")) is None
    assert anchored_of(run()) is None and scouted_of(run()) is None


@pytest.mark.parametrize("num_fans", [0, 1, 3])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_run_that_ends_within_the_scout_says_so(tmp_path: Path, num_fans: int, is_stopped: bool) -> None:
    path = write_run(tmp_path / "run", has_finder=True, is_finished=False, num_records=num_fans)
    if is_stopped:
        result = {
            "status": "stopped",
            "steps": 40,
            "found_lr": 0.01,
            "seconds": 3.0,
            "reason": "asked to stop",
        }
        (path / "result.json").write_text(json.dumps(result))
    one = read_run(path)
    assert one.notes == [] and len(one.scouting) == num_fans and one.records == []
    text = sentence(one)
    if num_fans:
        assert "a scout tried 1e-4 to " in text and f" in {num_fans} round" in text
        assert text.endswith("It has not decided yet, and the run itself has not begun.")
        chart = charts_of(one)["Scout"]
        assert chart.caption.endswith("No decision is recorded.")
        assert [name for name in traces_of(chart) if name.startswith(("chosen", "likely", "fitted"))] == []
        assert one.last_step == (40 if is_stopped else one.scouting[-1].step)
    else:
        assert text.endswith("The scout has not ended its first round yet, and the run itself has not begun.")
        assert charts_of(one) == {}
    assert "controller moved" not in text and "chose" not in text


def test_a_decision_that_was_lost_is_said() -> None:
    one = run(fan(10), sync(30, 1.0), sync(40, 3.0))
    assert anchored_of(one) is None
    assert "a scout tried 0.1 to 0.4 in 1 round. What it chose is not recorded." in sentence(one)
    assert list(charts_of(one)) == ["Scout"]


@pytest.mark.parametrize(
    "records",
    [
        [fan(factors=[0.0, -1.0, NAN], scores=[0.5, None, 1.0])],
        [fan(scores=[None, None, None])],
        [fan(scores=[NAN, INF, -INF], decided=decision())],
        [fan(factors=[], scores=[], decided=decision())],
        [fan(), fan(20, stage="other", factors=[], scores=[], decided=decision())],
        [fan(scores=[1.0], decided=decision())],
        [fan(scores=[HUGE, HUGE, -HUGE], decided=decision()), sync(30, 1.0)],
        [fan(scores=[-1.0, -2.0, 0.0], decided=decision(low=0.0, high=-1.0))],
        [fan(factors=[5e-324, HUGE, 1.0], decided=decision())],
        [fan(decided=decision(chosen=0.0)), sync(30, 1.0)],
        [fan(decided=decision(chosen=NAN, low=NAN, high=INF)), sync(30, 1.0)],
        [fan(decided=decision(factor=0.0)), sync(30, 1.0)],
        [fan(decided=decision(factor=-INF)), sync(30, 1.0)],
        [fan(peak_lr=NAN, decided=decision()), sync(30, 1.0)],
        [fan(peak_lr=2**1000, factors=[2**1000] * 3, decided=decision(chosen=2**1000)), sync(30, 1.0)],
        [sync(30, 0.0), sync(40, NAN, NAN), sync(50, -1.0, INF)],
        [sync(30, HUGE), sync(40, 5e-324, HUGE, gate="why")],
        [sync(30, 1.0), sync(40, 1.0, correction={"x": 1.0}, signal={"x": 1.0})],
    ],
)
def test_odd_records_do_no_harm(records: list[RoundRecord]) -> None:
    one = run(*records)
    charts_of(one)
    assert "has trained" in sentence(one) or "have trained" in sentence(one)

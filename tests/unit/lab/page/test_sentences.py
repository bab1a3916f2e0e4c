from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hdet.lab.page import Evaluation, Run, headline, sentence
from hdet.lab.page.run_comparison import comparison_words
from hdet.lab.page.run_numbers import asked_lr, found_lr
from hdet.lab.page.sentences import method_parts, run_tiles
from hdet.records import RoundRecord, SearchRecord
from hdet.round_record import ComparingRecord, GuardRecord, ThermostatRecord, WeightDecayRecord

CONFIG = {"lr": 3e-4, "steps": 600, "replicas": 8, "controllers": ["log"]}
RESULT = {"final_loss": 0.4123, "steps": 600, "seconds": 41.2, "status": "finished", "found_lr": 3.93e-4}
COMPARED = {"comparing": ComparingRecord(signal={"lr": 0.1})}


def record(step: int = 600, **more: Any) -> RoundRecord:
    fields: dict[str, Any] = {"correction": {"lr": 1.31}, "controllers": COMPARED}
    return RoundRecord(round=0, step=step, num_replicas=8, **(fields | more))


def run(**more: Any) -> Run:
    evaluations = [Evaluation(0, 0.69), Evaluation(600, 0.4123)]
    fields = {"config": CONFIG, "records": [record()], "evaluations": evaluations, "result": RESULT}
    return Run(**({"path": Path("runs/a"), "name": "a"} | fields | more))


def parts_of(*records: RoundRecord, **more: Any) -> dict[str, str]:
    return dict(method_parts(run(records=list(records), **more)))


def test_a_finished_run() -> None:
    assert sentence(run()) == "8 replicas trained for 600 steps in 41 s."
    assert headline(run()) == "Started from a learning rate of 3e-4, without a search."
    assert run_tiles(run()) == [
        ("Learning rate", "3.93e-4", "guess: 3e-4"),
        ("Held-out loss", "0.4123", "0.69 at first"),
        ("Fan-out", "none", "8 replicas, all alike"),
        ("Auto-LR", "moved the values", "lr x1.31 of the plan"),
    ]


def test_the_factor_is_taken_from_the_records_if_nobody_stated_it() -> None:
    without = {key: value for key, value in RESULT.items() if key != "found_lr"}
    assert found_lr(run(result=without)) == pytest.approx(3.93e-4)


def test_the_unit_of_the_loss_is_said() -> None:
    told = {label: hint for label, _, hint in run_tiles(run(config=CONFIG | {"loss_unit": "nats"}))}
    assert told["Held-out loss"] == "nats, 0.69 at first"


def test_an_unfinished_run() -> None:
    for evaluations in ([Evaluation(300, 0.5)], []):
        text = sentence(run(result={}, records=[record(300)], evaluations=evaluations))
        assert text == "The run is unfinished. 8 replicas trained for 300 of 600 steps so far."


@pytest.mark.parametrize("status", ["failed", "diverged"])
def test_the_reason_of_a_failure_is_said_once_for_all_replicas(status: str) -> None:
    reason = "no replica is healthy (replica 0: not finite; replica 1: not finite). Nothing was saved."
    result = {"status": status, "steps": 120, "seconds": 9.0, "reason": reason}
    assert sentence(run(result=result, records=[record(120)], evaluations=[])) == (
        f"The run {status} after 120 of 600 steps in 9 s. The reason is this: no replica is healthy. "
        "Nothing was saved."
    )


def test_a_stopped_run() -> None:
    stopped = {"status": "stopped", "steps": 120, "seconds": 90.0}
    text = sentence(run(result=stopped, records=[], evaluations=[]))
    assert text == "8 replicas trained for 120 of 600 steps in 90 s, then the run was stopped."


def test_without_a_search_the_headline_says_what_was_trained_with() -> None:
    quiet = run(records=[record(controllers={})])
    assert headline(quiet) == "Trained with a learning rate of 3e-4, without a search."
    assert headline(Run(path=Path("a"), name="a")) == ""


def test_records_alone_tell_loss_and_learning_rate() -> None:
    trace = {"num_steps": 2, "correction": {"lr": 1.0}, "controllers": {}}
    records = [
        record(2, base_trace={"lr": [1e-3, 2e-3]}, losses=[2.0] * 8, **trace),
        record(4, base_trace={"lr": [1e-3]}, losses=[1.0, None, 2.0], **trace),
        record(6, losses=[], **trace),
    ]
    one = Run(path=Path("a"), name="a", records=records)
    assert headline(one) == "Trained with a learning rate of 2e-3, without a search."
    assert sentence(one) == "8 replicas trained for 6 steps."
    assert run_tiles(one)[1] == ("Training loss", "1.5", "2 at first")
    one.records[-1] = replace(records[-1], correction={"lr": 0.5})
    assert (asked_lr(one), found_lr(one)) == (2e-3, pytest.approx(1e-3))


def test_the_form_of_the_paper_holds_the_values_itself() -> None:
    one = record(base={"lr": 2e-4, "weight_decay": 0.1}, correction={"lr": 1.0})
    parts = parts_of(one, config=CONFIG | {"controllers": ["paper"]})
    assert parts["auto-LR"] == "moved the values, lr 2e-4, weight_decay 0.1 at the end"


def test_replicas_left_out() -> None:
    assert parts_of(record(excluded={2: "x"}))["left out"] == "1 time, then healed: replica 2"
    several = parts_of(record(10, excluded={0: "x", 5: "x"}), record(20, excluded={5: "x"}))
    assert several["left out"] == "3 times, then healed: replica 0, 5"


def test_every_part_of_the_method_has_a_line() -> None:
    spread = {
        "multipliers": {"lr": [0.9, 1.1], "weight_decay": [0.5, 1.5]},
        "values": {"lr": [0.009, 0.011], "weight_decay": [0.05, 0.15]},
        "probes": [1.0, 0.8],
        "milliseconds": {"probe": 3.0, "converge": 2.0},
        "converged": True,
    }
    looked = WeightDecayRecord(slope=-0.5, slope_error=0.1)
    records = [
        record(
            10 * n,
            base={"lr": 0.01, "weight_decay": n / 10},
            controllers={
                "guard": GuardRecord(num_brakes=n // 5),
                "thermostat": ThermostatRecord(factors=[1 + n / 10]),
                "weight_decay": looked,
            },
            num_averaged_steps=75 * (n == 10),
            **spread,
        )
        for n in range(1, 11)
    ]
    search = SearchRecord(
        asked=1e-3, found=0.01, low=0.005, high=0.02, reason="", num_steps=46, ramp=[], trials=[[0.01, 1.0]]
    )
    one = run(records=records, search=search, result={"seconds": 1.0}, config={"controllers": ["guard"]})
    assert list(method_parts(one)) == [
        ("search", "0.01, found from 1e-3 by 1 trial in 46 steps"),
        ("fan-out", "8 replicas, lr x0.9 to x1.1, weight_decay x0.5 to x1.5, 10 rounds"),
        ("converge", "10 times, 5 % of the time in syncs"),
        (
            "replicas said",
            "higher lr, higher weight_decay, higher lr did better in 10 of 10 rounds, "
            "higher weight_decay did better in 10 of 10 rounds",
        ),
        ("thermostat", "x2, on the learning rate, by what averaging gained"),
        ("guard", "went back 2 times, and lowered the learning rate"),
        ("weight decay", "0.1 to 1, by 10 looks at held-out data, smaller weights would still help"),
        ("tail", "75 steps, the final weights are their mean"),
    ]
    assert not one.compares  # nobody compared replicas
    quiet = parts_of(record(controllers={}), config={"controllers": ["guard"]})
    assert quiet == {"fan-out": "none, 8 replicas, all alike", "guard": "had nothing to do"}


def test_nothing_recorded() -> None:
    nothing = Run(path=Path("a"), name="a", config=CONFIG)
    assert sentence(nothing) == "Nothing has been recorded of this run yet." and not dict(
        method_parts(nothing)
    )


def test_settings_of_the_wrong_kind_do_no_harm() -> None:
    odd = {"lr": "high", "steps": None, "replicas": [], "controllers": 5, "loss_unit": 3}
    assert sentence(run(config=odd)) == "8 replicas trained for 600 steps in 41 s." and run_tiles(
        run(config=odd)
    )


@pytest.mark.parametrize("correction", [0.0, -1.0, float("nan"), float("inf")])
def test_a_correction_that_is_no_factor_does_no_harm(correction: float) -> None:
    one = run(records=[record(correction={"lr": correction})], result=RESULT | {"found_lr": None})
    assert found_lr(one) == 3e-4


def test_comparison() -> None:
    runs = [run(name="a"), run(name="b", result=RESULT | {"final_loss": 0.5})]
    said = "“a” ended best, with a held-out loss of 0.4123.", "Next comes “b”, 21 % above."
    assert comparison_words(runs) == said
    other = replace(runs[1], config=CONFIG | {"task": "digits"})
    assert "on different tasks" in comparison_words([runs[0], other])[1]
    empty = Run(path=Path("c"), name="c", config=CONFIG)
    assert comparison_words([runs[0], empty]) == ("", "2 runs, of which one has a held-out loss.")
    assert comparison_words([empty, empty]) == ("", "2 runs, of which none has a held-out loss.")

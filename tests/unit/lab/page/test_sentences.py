from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hdet.lab.page import Evaluation, Run, headline, sentence
from hdet.lab.page.run_comparison import comparison_headline, comparison_sentence
from hdet.lab.page.run_numbers import asked_lr, found_lr, is_sweep
from hdet.lab.page.sentences import run_tiles
from hdet.records import RoundRecord

CONFIG = {"lr": 3e-4, "steps": 600, "replicas": 8, "controllers": ("log",)}
RESULT = {"final_loss": 0.4123, "steps": 600, "seconds": 41.2, "status": "finished", "found_lr": 3.93e-4}


def record(step: int = 600, **more: Any) -> RoundRecord:
    fields: dict[str, Any] = {"correction": {"lr": 1.31}, "signal": {"lr": 0.1}}
    return RoundRecord(round=0, step=step, num_replicas=8, **(fields | more))


def run(**more: Any) -> Run:
    evaluations = [Evaluation(0, 0.69), Evaluation(600, 0.4123)]
    fields = {"config": CONFIG, "records": [record()], "evaluations": evaluations, "result": RESULT}
    return Run(**({"path": Path("runs/a"), "name": "a"} | fields | more))


def test_a_finished_run() -> None:
    assert sentence(run()) == (
        "8 replicas trained for 600 steps in 41 s. The controller ended at 1.31 times the plan."
    )


def test_the_factor_is_taken_from_the_records_if_nobody_stated_it() -> None:
    without = {key: value for key, value in RESULT.items() if key != "found_lr"}
    assert sentence(run(result=without)) == sentence(run())
    assert found_lr(run(result=without)) == pytest.approx(3.93e-4)


def test_an_averaged_tail_is_said() -> None:
    averaged = sentence(run(records=[record(num_averaged_steps=45)]))
    assert "The final weights are the mean over the last 45 steps." in averaged
    assert "final weights" not in sentence(run())


def test_the_unit_of_the_loss_is_said() -> None:
    told = {label: hint for label, _, hint in run_tiles(run(config=CONFIG | {"loss_unit": "nats"}))}
    assert told["Held-out loss"] == "nats, 0.69 at first"


def test_an_unfinished_run() -> None:
    text = sentence(
        run(result={}, records=[record(300)], evaluations=[Evaluation(0, 0.69), Evaluation(300, 0.5)])
    )
    assert text.startswith("The run is unfinished. 8 replicas trained for 300 of 600 steps so far. ")


def test_an_unfinished_run_that_has_not_evaluated() -> None:
    text = sentence(run(result={}, records=[record(300, correction={})], evaluations=[]))
    assert text == "The run is unfinished. 8 replicas trained for 300 of 600 steps so far."


def test_a_failed_run() -> None:
    result = {"status": "failed", "steps": 120, "seconds": 9.0, "error": "no replica is healthy"}
    text = sentence(run(result=result, records=[record(120)], evaluations=[Evaluation(0, 0.69)]))
    assert text.startswith(
        "The run failed after 120 of 600 steps in 9 s. The reason is this: no replica is healthy. The"
    )


def test_the_reason_of_a_failure_is_said_once_for_all_replicas() -> None:
    error = "no replica is healthy (replica 0: not finite; replica 1: not finite). Nothing was saved."
    text = sentence(run(result={"status": "failed", "steps": 120, "error": error}))
    assert "The reason is this: no replica is healthy. Nothing was saved. The" in text


def test_a_stopped_run() -> None:
    text = sentence(
        run(result={"status": "stopped", "steps": 120, "seconds": 90.0}, records=[], evaluations=[])
    )
    assert text.startswith("8 replicas trained for 120 of 600 steps in 1 min 30 s, then the run was stopped.")


@pytest.mark.parametrize("controller", ["none", "guard", 5])
def test_only_what_compares_replicas_moves_the_learning_rate(controller: object) -> None:
    quiet = record(correction={"lr": 1.0}, signal={})
    config = {"lr": 3e-4, "steps": 600, "controller": controller}
    assert "controller" not in sentence(run(config=config, records=[quiet]))


def test_the_guard_is_named_where_it_went_back() -> None:
    lowered = [
        record(300, num_brakes=1, signal={}),
        record(num_brakes=2, correction={"lr": 1 / 9}, signal={}),
    ]
    text = sentence(run(records=lowered, result={}, config={"lr": 9e-4}))
    assert "The run collapsed 2 times. The guard went back and lowered the learning rate to 1e-4." in text
    assert "controller" not in text and "The run collapsed once." in sentence(run(records=lowered[:1]))


def test_without_a_search_the_headline_says_what_was_trained_with() -> None:
    quiet = run(records=[record(signal={})])
    assert headline(quiet) == "Trained with a learning rate of 3e-4, without a search."
    still = run(records=[record(correction={"lr": 1.0})], result={})
    assert headline(still) == "Started from a learning rate of 3e-4, without a search."
    assert headline(run()) == (
        "The controller asks for a learning rate of 3.93e-4, 1.3 times the guess of 3e-4."
    )
    assert headline(Run(path=Path("a"), name="a")) == ""


def test_records_alone_tell_loss_and_learning_rate() -> None:
    trace = {"num_steps": 2, "correction": {"lr": 1.0}, "signal": {}}
    records = [
        record(2, base_trace={"lr": [1e-3, 2e-3]}, losses=[2.0] * 8, **trace),
        record(4, base_trace={"lr": [1e-3]}, losses=[1.0, None, 2.0], **trace),
        record(6, losses=[], **trace),
    ]
    one = Run(path=Path("a"), name="a", records=records)
    assert headline(one) == "Trained with a learning rate of 2e-3, without a search."
    assert sentence(one) == "8 replicas trained for 6 steps."
    assert list(run_tiles(one))[1] == ("Training loss", "1.5", "2 at first")
    lowered = replace(records[-1], correction={"lr": 0.5}, num_brakes=1)
    one.records[-1] = lowered
    assert (asked_lr(one), found_lr(one)) == (2e-3, pytest.approx(1e-3))


def test_several_groups() -> None:
    text = sentence(run(records=[record(correction={"lr.a": 0.9, "lr.b": 1.31, "weight_decay": 7.0})]))
    assert "The controller ended at 0.9 to 1.31 times the plan, by parameter group." in text


def test_groups_with_learning_rates_of_their_own() -> None:
    trace = {"lr.body": [1e-3, 5e-4], "lr.head": [1e-2, 5e-3]}
    quiet = record(2, num_steps=2, base_trace=trace, correction={}, signal={})
    one = Run(path=Path("a"), name="a", records=[quiet])
    assert headline(one) == "Trained with learning rates from 1e-3 to 0.01, without a search."
    assert next(iter(run_tiles(one))) == ("Learning rate", "1e-3", "peak of the first group")


def test_the_form_of_the_paper() -> None:
    records = [record(base_trace={"lr": [1e-4, 5e-4]}, base={"lr": 2e-4}, num_steps=2)]
    text = sentence(run(config=CONFIG | {"controllers": ("paper",)}, records=records))
    assert "The controller held the learning rate itself, and ended at 2e-4." in text


def test_replicas_left_out() -> None:
    one = record(10, excluded={2: "loss"})
    assert "Replica 2 was left out of 1 sync and healed." in sentence(run(records=[one]))
    assert "Replica 2 was left out of 2 syncs and healed." in sentence(
        run(records=[one, record(20, excluded={2: "loss"})])
    )
    several = [record(10, excluded={0: "x", 2: "x", 5: "x"})]
    assert "Replicas 0, 2 and 5 were left out and healed, 3 times in all." in sentence(run(records=several))
    many = [record(10, excluded=dict.fromkeys(range(7), "x"))]
    assert "7 replicas were left out and healed, 7 times in all." in sentence(run(records=many))


def test_a_run_with_a_spread_says_what_differed_and_what_the_replicas_said() -> None:
    spread = {"lr": [0.8, 1.2], "wd.a": [0.5, 1.5], "wd.b": [0.5, 1.5]}
    bases = {"lr": 1e-5, "wd.a": 0.02, "wd.b": 0.02}
    more: dict[str, Any] = {"num_steps": 5, "multipliers": spread, "values": spread, "base": bases}
    more |= {"losses": [1.0, 0.5], "signal": {}, "correction": {}}
    one = run(records=[record(5 * i, **more) for i in range(1, 21)])
    assert sentence(one) == (
        "8 replicas trained for 600 steps in 41 s, each with its own value of lr and wd, averaged at every "
        "sync. What the replicas said: higher lr did better, higher wd.a did better and higher wd.b did "
        "better."
    )
    quiet = run(records=[record(5 * i, **more | {"losses": [1.0, 1.0]}) for i in range(1, 21)])
    assert sentence(quiet).endswith(" What the replicas said: no clear side.")
    few = run(records=[record(5 * i, **more) for i in range(1, 6)])
    assert sentence(few).endswith(" What the replicas said: too few rounds to tell.")
    guarded = replace(one, config=CONFIG | {"controllers": ("guard",)})
    assert sentence(guarded).endswith(" In this run they did not move the learning rate (controller guard).")
    tiles = {label: (value, hint) for label, value, hint in run_tiles(one)}
    assert tiles["Learning rate found"] == ("3.93e-4", "from a guess of 3e-4")
    assert tiles["Explored"] == ("2", "wd.a ended at 0.02")  # its schedule alone moved lr
    assert tiles["Rounds"] == ("20", "of 5 steps")


def test_held_out_data_that_moved_the_weight_decay_is_said() -> None:
    told: dict[str, Any] = {"signal": {"weight_decay": 0.2}, "slope_error": {"weight_decay": 0.01}}
    told |= {"slope": {"weight_decay": -0.5}, "correction": {"lr": 1.0}}
    bases = [{"lr": 1e-5, "weight_decay": decay} for decay in (0.3, 0.6)]
    one = run(records=[record(300 * i, base=base, **told) for i, base in enumerate(bases, start=1)])
    assert not one.compares  # nobody compared replicas
    assert sentence(one) == (
        "8 replicas trained for 600 steps in 41 s. Held-out data moved the weight decay from 0.3 to 0.6 (2 "
        "looks). At the end smaller weights would still help."
    )
    tiles = {label: (value, hint) for label, value, hint in run_tiles(one)}
    assert tiles["Weight decay"] == ("0.6", "found by held-out data, from 0.3") and "Explored" not in tiles
    both = record(600, base=bases[1], **told | {"signal": {"lr": 0.1, "weight_decay": 0.2}})
    assert run(records=[both]).compares


def test_nothing_recorded() -> None:
    nothing = Run(path=Path("a"), name="a", config=CONFIG)
    assert sentence(nothing) == "Nothing has been recorded of this run yet."


def test_settings_of_the_wrong_kind_do_no_harm() -> None:
    odd = {"lr": "high", "steps": None, "replicas": [], "controller": 5, "loss_unit": 3}
    assert "8 replicas trained for 600 steps" in sentence(run(config=odd))


@pytest.mark.parametrize("correction", [0.0, -1.0, float("nan"), float("inf")])
def test_a_correction_that_is_no_factor_does_no_harm(correction: float) -> None:
    one = run(records=[record(correction={"lr": correction})], result=RESULT | {"found_lr": None})
    assert found_lr(one) == 3e-4 and "controller moved" not in sentence(one)


def test_comparison() -> None:
    runs = [run(name="a"), run(name="b", result=RESULT | {"final_loss": 0.5})]
    assert comparison_headline(runs) == "“a” ended best, with a held-out loss of 0.4123."
    assert comparison_sentence(runs) == "Next comes “b”, 21 % above."
    other = replace(runs[1], config=CONFIG | {"task": "digits"})
    assert "on different tasks" in comparison_sentence([runs[0], other])
    assert comparison_headline([runs[0], other]) == ""
    empty = Run(path=Path("c"), name="c")
    assert comparison_sentence([runs[0], empty]) == "2 runs, of which one has a held-out loss."
    assert comparison_sentence([empty, empty]) == "2 runs, of which none has a held-out loss."


def swept(losses: dict[float, float | None], **config: Any) -> list[Run]:
    plain = {"task": "digits", "controllers": ()} | config
    return [
        Run(
            path=Path("a"),
            name=f"lr{lr:g}",
            config=plain | {"lr": lr, "name": f"lr{lr:g}"},
            result={"final_loss": loss, "status": "failed" if loss is None else "finished"},
            evaluations=[Evaluation(0, 2.3)],
        )
        for lr, loss in losses.items()
    ]


def test_a_sweep_says_its_best() -> None:
    runs = swept({0.001: 1.5, 0.03: 0.125, 0.1: 0.15, 30.0: 1e9})
    assert is_sweep(runs)
    assert comparison_headline(runs) == "The best of 4 learning rates is 0.03."
    assert comparison_sentence(runs) == (
        "It ended at a held-out loss of 0.125. The next best is 0.1, 20 % above."
    )
    assert "at the edge of the sweep" in comparison_sentence([*runs, *swept({1e-4: 0.1})])
    other = replace(runs[0], config=runs[0].config | {"seed": 3})
    assert not is_sweep([*runs[1:], other]) and not is_sweep([*runs, runs[0]]) and not is_sweep(runs[:2])

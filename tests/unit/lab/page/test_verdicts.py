import math
import random
from typing import Any

import pytest

from hdet.lab.page.verdicts import what_held_out_data_said, what_replicas_said
from hdet.records import RoundRecord
from hdet.round_record import WeightDecayRecord


def record(losses: list[float | None], factors: list[float], **more: Any) -> RoundRecord:
    fields: dict[str, Any] = {"round": 0, "step": 10, "num_replicas": len(losses), "losses": losses}
    spread: dict[str, Any] = {"multipliers": {"lr": factors}, "values": {"lr": [0.1 * f for f in factors]}}
    return RoundRecord(**(fields | spread | more))


def test_by_hand() -> None:
    # Losses around the mean of each round: 0.1 and 0.2 at the lower value, so a mean of 0.15.
    records = [record([1.0, 0.8], [0.8, 1.2]), record([1.0, 0.6], [0.8, 1.2])]
    (said,) = what_replicas_said(records)
    low, high = said.losses
    assert low == pytest.approx((0.8, 0.15, 0.05)) and high == pytest.approx((1.2, -0.15, 0.05))
    assert (said.num_higher, said.num_lower, said.num, said.side) == (2, 0, 2, "")
    assert said.verdict == "too few rounds to tell"


@pytest.mark.parametrize(("slope", "side"), [(-2.0, "higher"), (2.0, "lower"), (0.0, "")])
def test_a_side_is_found_under_noise_and_none_where_there_is_none(slope: float, side: str) -> None:
    chance = random.Random(0)
    factors = [0.9, 0.95, 1.0, 1.05, 1.1]
    records = []
    for i in range(100):
        chance.shuffle(factors)
        losses: list[float | None] = [slope * math.log(f) + chance.gauss(5.0 - i / 50, 0.1) for f in factors]
        records.append(record(losses, list(factors)))
    (said,) = what_replicas_said(records)
    assert said.side == side
    assert said.verdict == (f"{side} lr" if side else "no clear side")


@pytest.mark.parametrize(
    ("slope", "said"),
    [
        (0.0, "below 0.2 a round, a controller does not hear them before T = 53"),
        (1.0, "0.96 a round, a controller hears them from about T = 2"),
    ],
)
def test_how_loud_replicas_were(slope: float, said: str) -> None:
    chance, factors = random.Random(1), [0.9, 0.95, 1.0, 1.05, 1.1]
    width = math.sqrt(sum(math.log(f / 1.0) ** 2 for f in factors))
    records = []
    for i in range(100):  # noise falls over the run, and so does what the replicas say
        scale = 10 ** (-i / 50)
        losses: list[float | None] = [
            scale * (slope / width * math.log(f) + chance.gauss(0, 1)) + 2 for f in factors
        ]
        records.append(record(losses, factors, num_steps=10))
    (one,) = what_replicas_said(records)
    assert one.loudness == said


def rounds(*differences: float) -> list[RoundRecord]:
    """Rounds of ten steps, each with the loss at the higher value minus the loss at the lower one."""
    return [record([0.0, d], [0.9, 1.1], step=10 * i) for i, d in enumerate(differences, start=1)]


HIGHER, LOWER, MIXED = [-1.0], [0.001], [0.001, -0.001]


@pytest.mark.parametrize(
    ("differences", "verdict", "counts"),
    [
        # The first rounds are a thousand times larger: their mean would hide all others.
        (HIGHER * 8 + LOWER * 50, "lower lr", "lower lr did better in 50 of 58 rounds"),
        (LOWER * 15 + MIXED * 4, "lower lr", "lower lr did better in 19 of 23 rounds"),
        (HIGHER * 7 + LOWER * 11, "no clear side", "lower lr did better in 11 of 18 rounds"),
        (HIGHER * 8, "higher lr", "higher lr did better in 8 of 8 rounds"),
        (HIGHER * 7, "too few rounds to tell", "lower lr did better in 0 of 7 rounds"),
        ([0.0] * 9, "no clear side", "lower lr did better in 0 of 9 rounds"),
    ],
)
def test_every_round_counts_once(differences: list[float], verdict: str, counts: str) -> None:
    (said,) = what_replicas_said(rounds(*differences))
    assert (said.verdict, said.counts) == (verdict, counts)


def test_chance_seldom_has_a_side() -> None:
    chance = random.Random(0)
    runs = [what_replicas_said(rounds(*(chance.gauss(0, 1) for _ in range(60)))) for _ in range(200)]
    assert sum(bool(said.side) for (said,) in runs) < 8


def test_the_probe_counts_and_who_was_left_out_does_not() -> None:
    more: dict[str, Any] = {"probes": [2.0, 1.0, 99.0], "excluded": {2: "far above"}}
    (said,) = what_replicas_said([record([1.0, 2.0, 3.0], [0.5, 1.0, 1.5], **more)] * 2)
    assert [loss.value for loss in said.losses] == [0.5, -0.5] and said.num_higher == 2


@pytest.mark.parametrize(
    "odd",
    [
        record([1.0, 2.0], [1.0, 1.0]),
        record([None, 2.0], [0.5, 1.5]),
        record([1.0, 2.0], [0.5, 1.5], ends_round=False),
        record([1.0], [0.5, 1.5]),
        record([math.nan, 1e308], [0.5, 1.5]),
        record([1.0, 2.0], [0.5, 1.5], values={"lr": [0.0, math.inf]}),
    ],
)
def test_rounds_without_a_comparison_say_nothing(odd: RoundRecord) -> None:
    assert what_replicas_said([odd] * 9) == [] and what_replicas_said([]) == []


def looks(*slopes: float, error: float = 0.1) -> list[RoundRecord]:
    """One record before the looks, which has what the run began with, and one for each."""
    first: dict[str, Any] = {"base": {"weight_decay": 0.42}, "base_trace": {"weight_decay": [0.4]}}
    told = [
        {
            "base": {"weight_decay": 0.5 + n / 10},
            "controllers": {"weight_decay": WeightDecayRecord(slope=slope, slope_error=error)},
        }
        for n, slope in enumerate(slopes, start=1)
    ]
    return [RoundRecord(round=n, step=n, num_replicas=2, **fields) for n, fields in enumerate([first, *told])]


@pytest.mark.parametrize(
    ("slopes", "verdict"),
    [
        ((9.0, -0.3, -0.2, -0.3, -0.1), "smaller weights would still help"),
        ((-9.0, 0.3, 0.2, 0.3, 0.1), "smaller weights would not help"),
        ((-9.0, 0.3, 0.2, -0.3, 0.1), "it is not clear whether smaller weights would help"),
        # They see the same examples, so that many are not surer than one.
        ((-0.19,) * 12, "it is not clear whether smaller weights would help"),
        ((math.nan, -0.3), "smaller weights would still help"),
    ],
)
def test_held_out_data_says_what_it_thinks_at_the_end(slopes: tuple[float, ...], verdict: str) -> None:
    said = what_held_out_data_said(looks(*slopes))
    assert said is not None and said.verdict == verdict
    assert (said.first, said.last) == (0.4, pytest.approx(0.5 + len(slopes) / 10))


def test_without_looks_held_out_data_says_nothing() -> None:
    assert what_held_out_data_said(looks()) is None and what_held_out_data_said([]) is None

import math
import random
from typing import Any

import pytest

from hdet.lab.page.what_replicas_said import means_by_place, what_replicas_said
from hdet.records import RoundRecord


def record(losses: list[float | None], factors: list[float], **more: Any) -> RoundRecord:
    fields: dict[str, Any] = {"round": 0, "step": 10, "num_replicas": len(losses), "losses": losses}
    spread: dict[str, Any] = {"multipliers": {"lr": factors}, "values": {"lr": [0.1 * f for f in factors]}}
    return RoundRecord(**(fields | spread | more))


def test_by_hand() -> None:
    # Over log values of -w/2 and w/2: differences of -0.2 and -0.4, so a mean of -0.3 and an error of 0.1.
    records = [record([1.0, 0.8], [0.8, 1.2]), record([1.0, 0.6], [0.8, 1.2])]
    (said,) = what_replicas_said(records)
    assert said.difference[1:] == pytest.approx((-0.3, 0.1, 2))
    width = math.log(1.2 / 0.8)
    assert said.slope == pytest.approx((-0.3 / width, 0.1 / width))
    low, high = said.places
    assert low == pytest.approx((0.8, 0.15, 0.05, 2)) and high == pytest.approx((1.2, -0.15, 0.05, 2))
    assert said.sentence == "Too few rounds to tell the better side of lr." and not said.is_clear


def test_a_slope_is_found_under_noise_and_none_where_there_is_none() -> None:
    chance = random.Random(0)
    factors = [0.9, 0.95, 1.0, 1.05, 1.1]
    for slope, side in ((-2.0, "higher"), (2.0, "lower"), (0.0, "")):
        records = []
        for i in range(100):
            chance.shuffle(factors)
            losses: list[float | None] = [
                slope * math.log(f) + chance.gauss(5.0 - i / 50, 0.1) for f in factors
            ]
            records.append(record(losses, list(factors)))
        (said,) = what_replicas_said(records)
        found, error = said.slope
        assert [stretch.side for stretch in said.stretches] == [side] and abs(found - slope) < 3 * error
        assert said.sentence.startswith(
            f"{side.title()} lr did better (in " if side else "No clear side of lr (lower in "
        )
        assert said.sentence.endswith(" of 100 rounds).")


def rounds(*differences: float) -> list[RoundRecord]:
    """Rounds of ten steps, each with the loss at the higher value minus the loss at the lower one."""
    return [record([0.0, d], [0.9, 1.1], step=10 * i) for i, d in enumerate(differences, start=1)]


HIGHER, LOWER, MIXED = [-1.0], [0.001], [0.001, -0.001]


@pytest.mark.parametrize(
    ("differences", "sentence"),
    [
        # The first rounds are a thousand times larger: their mean would hide all others.
        (
            HIGHER * 8 + LOWER * 50,
            "Higher lr did better until step 80 (in 8 of 8 rounds), lower lr did better after it "
            "(in 50 of 50 rounds).",
        ),
        (HIGHER + LOWER * 30, "Lower lr did better (in 30 of 31 rounds)."),
        (LOWER * 15 + MIXED * 4, "Lower lr did better (in 19 of 23 rounds)."),
        (HIGHER * 7 + LOWER * 11, "No clear side of lr (lower in 11 of 18 rounds)."),
        (MIXED * 10, "No clear side of lr (lower in 10 of 20 rounds)."),
        (HIGHER * 8, "Higher lr did better (in 8 of 8 rounds)."),
        (HIGHER * 7, "Too few rounds to tell the better side of lr."),
        ([0.0] * 9, "No clear side of lr (lower in 0 of 9 rounds)."),
    ],
)
def test_every_round_counts_once_and_a_change_of_side_is_found(
    differences: list[float], sentence: str
) -> None:
    (said,) = what_replicas_said(rounds(*differences))
    assert said.sentence == sentence


def test_the_slope_is_that_of_the_rounds_since_the_side_changed() -> None:
    (said,) = what_replicas_said(rounds(*HIGHER * 8, *LOWER * 20))
    assert said.turn == 80 and said.difference[1:] == pytest.approx((0.001, 0.0, 20))
    assert [place.num for place in said.places] == [20, 20]


def test_chance_seldom_has_a_side() -> None:
    chance = random.Random(0)
    clear = 0
    for _ in range(200):
        (said,) = what_replicas_said(rounds(*(chance.gauss(0, 1) for _ in range(60))))
        clear += said.is_clear
    assert clear < 8


def test_the_probe_counts_and_who_was_left_out_does_not() -> None:
    more: dict[str, Any] = {"probes": [2.0, 1.0, 99.0], "excluded": {2: "far above"}}
    (said,) = what_replicas_said([record([1.0, 2.0, 3.0], [0.5, 1.0, 1.5], **more)] * 2)
    assert said.difference.mean == pytest.approx(-1.0) and len(said.places) == 2


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


def test_neighbours_among_many_places_are_taken_together() -> None:
    factors = [0.5 + r / 63 for r in range(64)]
    weights = [1 / 64] * 64
    means = means_by_place([record([1.0] * 64, factors, weights=weights)], "lr", lambda r: r.weights)
    assert len(means) == 17 and {mean.mean for mean in means} == {1 / 64}
    assert sum(mean.num for mean in means) == 64

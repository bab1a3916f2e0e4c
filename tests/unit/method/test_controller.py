import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.method.controller import (
    Controller,
    ControllerState,
    always_positive,
    joint_signals,
    log_update,
    paper_update,
)

PAPER = {"momentum": 0.9, "step_size": 0.5, "decay": 0.0}


def test_equation_7_by_hand() -> None:
    state = ControllerState(base=2.0, velocity=0.4)
    state = paper_update(state, 0.1, momentum=0.9, step_size=0.5, decay=0.05)
    assert state.velocity == pytest.approx(0.9 * 0.4 + 0.1 * 0.1)
    assert state.base == pytest.approx(2.0 * 0.95 + 0.5 * state.velocity)


def lowest_base(
    *, spread: float, momentum: float, step_size: float, decay: float, rounds: int = 3000
) -> float:
    """Eq. 7 without the guard, the lowest replica winning every round; in units of the start."""
    base, velocity, lowest = 1.0, 0.0, 1.0
    for _ in range(rounds):
        velocity = momentum * velocity + (1 - momentum) * (-spread * base)
        base = base * (1 - decay) + step_size * velocity
        lowest = min(lowest, base)
        scale = max(abs(base), abs(velocity)) or 1.0
        if scale < 1e-100:
            base, velocity = base / scale, velocity / scale
    return lowest


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.02])
@pytest.mark.parametrize("step_size", [0.1, 0.5, 1.0])
def test_the_condition_for_a_positive_base_is_exact(momentum: float, decay: float, step_size: float) -> None:
    gap = math.sqrt(1 - decay) - math.sqrt(momentum)
    critical = gap**2 / (step_size * (1 - momentum)) if gap > 0 else 0.0
    for spread in (0.9 * critical, 1.1 * critical):
        if not 0 < spread < 1:
            continue
        settings = {"spread": spread, "momentum": momentum, "step_size": step_size, "decay": decay}
        assert always_positive(**settings) == (lowest_base(**settings) > 0)


def test_the_papers_constants_can_go_negative() -> None:
    assert not always_positive(spread=1 / 9, momentum=0.9, step_size=0.5)
    assert lowest_base(spread=1 / 9, **PAPER) < 0
    # The bound of lambda * alpha at gamma 0 and beta 0.9; the paper has 0.0556.
    assert always_positive(spread=0.0263, momentum=0.9, step_size=1.0)
    assert not always_positive(spread=0.0265, momentum=0.9, step_size=1.0)


def test_the_guard_keeps_the_base_positive_where_the_printed_rule_does_not() -> None:
    state = ControllerState(1.0)
    for _ in range(500):
        state = paper_update(state, -state.base / 9, **PAPER)
        assert state.base > 0


def test_the_guard_leaves_a_strong_decay_alone() -> None:
    assert paper_update(ControllerState(1.0), 0.0, momentum=0.9, step_size=0.5, decay=0.999).base == (
        pytest.approx(0.001)
    )


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=50), st.floats(0.01, 1), st.floats(0, 0.99))
def test_a_log_step_stays_inside_the_explored_range(
    signals: list[float], step_size: float, momentum: float
) -> None:
    half_width, state = math.log(10 / 9), ControllerState(0.0)
    for signal in signals:
        new = log_update(state, signal, momentum=momentum, step_size=step_size, half_width=half_width)
        assert abs(new.base - state.base) <= half_width + 1e-12
        state = new


def test_the_log_form_finds_a_planted_optimum() -> None:
    """Losses (log value - log best)^2 plus noise: the correction must reach the best value."""
    generator, best, state = random.Random(0), math.log(3.0), ControllerState(0.0)
    x = [-0.11, -0.04, 0.04, 0.11]
    for _ in range(400):
        losses = [(state.base + xi - best) ** 2 + generator.gauss(0, 0.01) for xi in x]
        (signal,) = joint_signals([x], losses)
        state = log_update(state, signal, momentum=0.5, step_size=0.3, half_width=0.11)
    assert state.base == pytest.approx(best, abs=0.1)


def test_the_correction_has_a_limit() -> None:
    state = ControllerState(0.0)
    for _ in range(100):
        state = log_update(
            state, 1.0, momentum=0.0, step_size=1.0, half_width=1.0, max_log_correction=math.log(100)
        )
    assert state.base == math.log(100)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"form": "papre"}, ValueError, "form must be one of 'paper', 'log', got 'papre'"),
        ({"start": -1}, ValueError, "start must be an integer of at least 0, got -1"),
        ({"start": 1.5}, TypeError, "start must be an integer"),
        ({"step_size": 0.0}, ValueError, "step_size must be a number above 0, got 0.0"),
        ({"step_size": math.nan}, ValueError, "step_size"),
        ({"momentum": 1.0}, ValueError, r"momentum must be a number in \[0, 1\), got 1.0"),
        ({"temperature": "hot"}, ValueError, "temperature must be one of 'auto' or a number above 0"),
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"end": "slow", "form": "paper"}, ValueError, "end must be one of 'floor' or a number above 0"),
        ({"end": 0.0, "form": "paper"}, ValueError, "end must be a number above 0, got 0.0"),
        ({"end": 0.1}, ValueError, "end must be 1 for form='log'"),
        ({"step_size": 2.0}, ValueError, "step_size must be at most 1 for form='log'"),
        ({"max_correction": 0.5}, ValueError, "max_correction must be a number of at least 1"),
    ],
)
def test_bad_settings(settings: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Controller(**settings)

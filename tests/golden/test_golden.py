"""Traces of the reference on plain floats, kept as JSON: a change of the method shows as a difference.

Rewrite them with ``pytest tests/golden --regen`` after a change that is meant.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hdet.method import reference
from hdet.method.controller import Controller

CASES: dict[str, dict[str, Any]] = {
    "no_controller": {"controller": None},
    "paper": {"controller": Controller(form="paper", start=10, temperature=0.01, end="floor")},
    "log": {"controller": Controller(form="log", start=10)},
}


def trace_of(case: dict[str, Any]) -> dict[str, Any]:
    def gradient(theta: list[float], replica: int, step: int) -> tuple[float, list[float]]:
        target = math.sin(step + 3 * replica)
        loss = sum((x - target) ** 2 / 2 for x in theta)
        return loss, [x - target for x in theta]

    trace = reference.train(
        [1.0, -1.0],
        gradient=gradient,
        optimizer=reference.sgd(momentum=0.5),
        schedule=lambda t: [0.1 * (1 - t / 60), 0.05],
        num_replicas=4,
        spread=0.25,
        sync_every=5,
        total_steps=40,
        names=["lr.0", "lr.1"],
        floors=[1e-3, 1e-3],
        seed=1,
        **case,
    )
    return {
        "first_values": [step.values for step in trace.steps[:6]],
        "rounds": [r._asdict() for r in trace.rounds],
        "parameters": trace.parameters[0],
    }


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    path = Path(__file__).parent / f"{name}.json"
    trace = trace_of(CASES[name])
    if request.config.getoption("--regen"):
        path.write_text(json.dumps(trace, indent=1) + "\n")
    _assert_close(json.loads(path.read_text()), json.loads(json.dumps(trace)))


def _assert_close(expected: Any, actual: Any) -> None:
    if isinstance(expected, dict):
        assert expected.keys() == actual.keys()
        for key in expected:
            _assert_close(expected[key], actual[key])
    elif isinstance(expected, list):
        assert len(expected) == len(actual)
        for a, b in zip(expected, actual, strict=True):
            _assert_close(a, b)
    else:
        assert actual == pytest.approx(expected, rel=1e-12, abs=1e-15)

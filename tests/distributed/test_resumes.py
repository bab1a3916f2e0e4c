"""Runs that are saved at random steps go on in the same bits. ``make soak`` has hundreds of them."""

from __future__ import annotations

import pytest

from tests.helpers.replicas import run_replicas
from tests.helpers.resumes import KINDS, resumes

BRAKED, STEERED = 1, 0


@pytest.mark.parametrize(
    ("kind", "seed"),
    [*((kind, BRAKED) for kind in KINDS), ("ranks with a spread", STEERED), ("shards", STEERED)],
)
def test_a_run_with_all_controllers_resumes_in_the_same_bits(kind: str, seed: int) -> None:
    for num_brakes, differing in run_replicas(resumes, KINDS[kind], kind, seed, 2, timeout_seconds=150):
        assert differing == [] and (num_brakes > 0) == (seed == BRAKED)

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.lab.plan import Plan, plan


def test_by_hand() -> None:
    # 4 replicas, 10 M float32 weights: 40 MB, 1.5 times of it sent; 4 half buckets and one exchange.
    more = {"latency_seconds": 0.002, "memory_bandwidth_bytes_per_second": 20e9}
    costs = plan(10_000_000, 4, 0.25, 1e9, 200, **more)
    expected = Plan(
        num_collectives_per_sync=5,
        bytes_per_sync=60e6,
        seconds_per_sync=0.06 + 0.01 + 0.01,
        overhead_percent=0.16,
        suggested_sync_every=320,
    )
    for field in dataclasses.fields(Plan):
        assert getattr(costs, field.name) == pytest.approx(getattr(expected, field.name)), field.name


def test_half_precision_travels_as_single() -> None:
    single = plan(1_000_000, 2, 0.1, 1e9, 100)
    half = plan(1_000_000, 2, 0.1, 1e9, 100, bytes_per_parameter=2)
    assert half.bytes_per_sync == single.bytes_per_sync == 4e6
    assert half.seconds_per_sync == single.seconds_per_sync


def test_double_precision_travels_as_it_is() -> None:
    assert plan(1_000_000, 2, 0.1, 1e9, 100, bytes_per_parameter=8).bytes_per_sync == 8e6


def test_one_replica_costs_nothing() -> None:
    costs = plan(1_000_000, 1, 0.1, 1e9, 100)
    assert (costs.seconds_per_sync, costs.bytes_per_sync, costs.suggested_sync_every) == (0, 0, 1)


def test_equal_replicas_are_not_averaged() -> None:
    # 9 numbers to each of 3 others; the weights are read twice.
    costs = plan(
        10_000_000, 4, 0.25, 1e9, 20, averages=False, latency_seconds=0.002,
        memory_bandwidth_bytes_per_second=20e9,
    )  # fmt: skip
    assert (costs.num_collectives_per_sync, costs.bytes_per_sync) == (1, 216)
    assert costs.seconds_per_sync == pytest.approx(216 / 1e9 + 0.002 + 2 * 40e6 / 20e9)


def test_what_the_benchmark_measured() -> None:
    """25 M parameters on 4 gloo ranks: one all-reduce 150 ms, a sync with its check for NaN 207 ms."""
    costs = plan(25_000_000, 4, 1.0, 150e6 / 0.150, 1000, latency_seconds=1e-3)
    assert costs.seconds_per_sync > 0.150
    assert 1000 * costs.seconds_per_sync == pytest.approx(207, rel=0.1)


@given(
    num_parameters=st.integers(1, 10**11),
    num_replicas=st.integers(2, 4096),
    step_seconds=st.floats(1e-4, 100),
    bandwidth=st.floats(1e6, 1e12),
)
def test_the_suggestion_is_the_smallest(
    num_parameters: int, num_replicas: int, step_seconds: float, bandwidth: float
) -> None:
    def overhead(sync_every: int) -> float:
        return plan(num_parameters, num_replicas, step_seconds, bandwidth, sync_every).overhead_percent

    suggested = plan(num_parameters, num_replicas, step_seconds, bandwidth, 1).suggested_sync_every
    assert overhead(suggested) <= 0.1 * (1 + 1e-9)
    if suggested > 1:
        assert overhead(suggested - 1) > 0.1 * (1 - 1e-9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_parameters", 0),
        ("num_replicas", 0),
        ("step_seconds", 0.0),
        ("bandwidth_bytes_per_second", math.inf),
        ("sync_every", 0),
        ("bytes_per_parameter", 0),
        ("latency_seconds", -1.0),
        ("memory_bandwidth_bytes_per_second", 0.0),
    ],
)
def test_arguments_out_of_range_are_named(name: str, value: float) -> None:
    arguments = {
        "num_parameters": 1000,
        "num_replicas": 2,
        "step_seconds": 0.1,
        "bandwidth_bytes_per_second": 1e9,
        "sync_every": 10,
    }
    with pytest.raises(ValueError, match=f"^{name} must be"):
        plan(**(arguments | {name: value}))  # pyright: ignore[reportArgumentType]

"""The mean over real replicas: kinds of tensors, buckets, replicas that are left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hdet.replicas import Averager, ReplicaGroup
from hdet.replicas.health import Health
from tests.helpers.replicas import run_replicas


def tensors_of(rank: int) -> list[torch.Tensor]:
    """All kinds of tensors, with values that tell their replica."""
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return [
        draw(7),
        draw(3, 4),
        draw(),
        draw(0),
        draw(1000),  # larger than a small bucket
        draw(30, 40).t(),  # not contiguous
        draw(2, 3, 5, 4).to(memory_format=torch.channels_last),
        draw(6, dtype=torch.bfloat16),
        draw(6, dtype=torch.float16),
        draw(9, dtype=torch.float64),
        torch.complex(draw(5), draw(5)),
        draw(20)[::2],  # with gaps
        draw(3, 1).expand(3, 1),
    ]


def average_all(rank: int, bucket_mib: float, excluded: list[int]) -> list[torch.Tensor]:
    tensors = tensors_of(rank)
    if rank in excluded:
        for t in tensors:
            t.fill_(float("nan"))
    count = dist.get_world_size() - len(excluded)
    averager = Averager(ReplicaGroup.of(None), bucket_mib=bucket_mib)
    averager.average_(tensors, contribute=rank not in excluded, num_contributors=count)
    return tensors


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("bucket_mib", [25.0, 1e-3, 1e-5])
@pytest.mark.parametrize("excluded", [[], [1]])
def test_every_replica_receives_the_mean(world_size: int, bucket_mib: float, excluded: list[int]) -> None:
    results = run_replicas(average_all, world_size, bucket_mib, excluded)
    included = [tensors_of(r) for r in range(world_size) if r not in excluded]
    for i, kinds in enumerate(zip(*included, strict=True)):
        wide = [t.to(torch.complex128 if t.is_complex() else torch.float64) for t in kinds]
        mean = (sum(wide) / len(wide)).to(kinds[0].dtype)  # pyright: ignore[reportAttributeAccessIssue]
        for result in results:
            # Half precisions are summed in float32: only the last rounding shows.
            torch.testing.assert_close(
                result[i], mean, rtol=1e-6 if mean.dtype.itemsize > 2 else 1e-2, atol=1e-6
            )
            assert torch.equal(result[i], results[0][i])
            assert result[i].stride() == kinds[0].stride()


def average_equal(rank: int) -> list[torch.Tensor]:
    tensors = tensors_of(0)
    Averager(ReplicaGroup.of(None)).average_(tensors)
    return tensors


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_mean_of_equal_values_is_exact(world_size: int) -> None:
    for result in run_replicas(average_equal, world_size):
        for tensor, expected in zip(result, tensors_of(0), strict=True):
            assert torch.equal(tensor, expected)


def average_half(rank: int) -> torch.Tensor:
    # 4096 + 1 is not a bfloat16 or float16; a sum in half precision would lose the ones.
    tensor = torch.full((8,), 2048.0 if rank == 0 else 1.0, dtype=torch.float16)
    Averager(ReplicaGroup.of(None)).average_([tensor])
    return tensor


def test_half_precisions_are_summed_in_float32() -> None:
    for result in run_replicas(average_half, 4):
        assert result.tolist() == [float(torch.tensor(2051 / 4, dtype=torch.float16))] * 8


def peak_memory(rank: int, bucket_mib: float) -> float:
    """Extra bytes that averaging allocates at most, over the bucket."""
    tensors = [torch.randn(50_000) for _ in range(40)]
    with torch.profiler.profile(profile_memory=True) as profile:
        Averager(ReplicaGroup.of(None), bucket_mib=bucket_mib).average_(tensors)
    events = profile.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    live, peak = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak / (bucket_mib * 2**20)


def test_peak_extra_memory_is_one_bucket() -> None:
    for ratio in run_replicas(peak_memory, 2, 1.0):
        assert 0.5 < ratio <= 1.01


def test_alone_nothing_happens() -> None:
    tensor: Any = torch.ones(2)
    Averager(ReplicaGroup.of(None)).average_([tensor])
    assert tensor.tolist() == [1, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_is_found_in_any_tensor(bad: float) -> None:
    for i in range(len(tensors_of(0))):
        tensors = tensors_of(0)
        assert Health().all_finite(tensors)
        if tensors[i].numel():
            tensors[i].view(-1)[-1:].fill_(bad) if tensors[i].is_contiguous() else tensors[i][-1].fill_(bad)
            assert not Health().all_finite(tensors)


def test_large_half_precision_values_are_finite() -> None:
    assert Health().all_finite([torch.full((1000,), 60000.0, dtype=torch.float16)])

"""What the copies of converge cost a core, part by part: `python -m benchmarks.copies`.

Processor time of one thread, so that it can be measured on a busy machine. Writes benchmarks/copies.json.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.rows import gpt_shapes
from hdet.replicas.tensors import KnownTensors

__all__ = ["main"]

HALF_BUCKET = 25 * 2**20 // 2 // 4
"""Elements of half a bucket. Tensors of half as many and more are reduced where they are."""
NUM_REPLICAS = 4


def parts(tensors: list[Tensor]) -> dict[str, Callable[[], object]]:
    """Every way to fill the bucket and to empty it that was tried; the first three are what converge does."""
    flats = [t.view(-1) for t in tensors if 2 * t.numel() < HALF_BUCKET]
    bucket = torch.empty(sum(map(Tensor.numel, flats)))
    views = list(bucket.split([flat.numel() for flat in flats]))
    arrays = [(flat.numpy(), view.numpy()) for flat, view in zip(flats, views, strict=True)]
    known = KnownTensors()
    known.remember(tensors)

    def fill_by_numpy() -> None:
        for array, view in arrays:
            view[...] = array

    def empty_by_numpy() -> None:
        for array, view in arrays:
            array[...] = view

    def divide_into_place() -> None:
        for flat, view in zip(flats, views, strict=True):
            torch.div(view, NUM_REPLICAS, out=flat)

    return {
        "fill: torch.cat": lambda: torch.cat(flats, out=bucket),
        "empty: divide the bucket, copy by numpy": lambda: (bucket.div_(NUM_REPLICAS), empty_by_numpy()),
        "the same tensors as last time?": lambda: known.are(tensors),
        "fill: numpy": fill_by_numpy,
        "fill: _foreach_copy_": lambda: torch._foreach_copy_(views, flats),
        "empty: divide and copy in one pass": divide_into_place,
        "empty: divide the bucket, _foreach_copy_": lambda: (
            bucket.div_(NUM_REPLICAS),
            torch._foreach_copy_(flats, views),
        ),
    }


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    """Measure, print, save."""
    torch.set_num_threads(1)
    cases = {
        "25 M parameters in 148 tensors": (gpt_shapes(272), 21),
        "1 M parameters in 2000 tensors": ([torch.Size([500])] * 2000, 101),
    }
    results = {}
    for name, (shapes, repeats) in cases.items():
        tensors = [torch.randn(shape) for shape in shapes]
        results[name] = {part: round(milliseconds(run, repeats), 3) for part, run in parts(tensors).items()}
        print(name, *(f"  {part}: {ms} ms" for part, ms in results[name].items()), sep="\n")
    saved = {"command": "python -m benchmarks.copies", "milliseconds of one thread": results}
    (Path(__file__).parent / "copies.json").write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A sync walks through few files: those of its phases, and nothing that makes equal replicas diverge."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hdet
from tests.helpers.replicas import run_replicas

ROOM = str(Path(hdet.__file__).parent)
SYNC_EVERY = 5


def files_walked(call: Callable[[], Any]) -> set[str]:
    """The files of hdet whose functions a call enters."""
    files: set[str] = set()

    def enter(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOM):
            files.add(str(Path(frame.f_code.co_filename).relative_to(ROOM)))

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def longest_walk(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[str]:
    """Of all syncs after a warm-up: the one that walks through the most files."""
    longest: set[str] = set()
    for step in range(1, steps + 1):
        loss = model(torch.randn(4, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        files = files_walked(lambda loss=loss: scheduler.step(loss))
        if step % SYNC_EVERY == 0 and step > steps // 4:
            longest = max(longest, files, key=len)
    return sorted(longest)


def test_a_sync_of_auto_lr_on_one_device_walks_through_twelve_files_at_most():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    auto = hdet.AutoLR(optimizer, total_steps=1000, model=model, sync_every=SYNC_EVERY)
    files = longest_walk(model, optimizer, auto, 200)
    assert len(files) <= 12, files
    assert "replicas/copies.py" in files  # a copy for the guard is among the syncs
    assert not {"method/fan_out.py", "explore/tunable.py", "replicas/exchange.py"} & set(files)


def _one_cycle(rank: int) -> list[str]:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = hdet.OneCycleAutoLR(
        optimizer,
        max_lr=0.1,
        total_steps=1000,
        ensemble_lr_spread_ratio=1 / 9,
        model_sync_interval=SYNC_EVERY,
        auto_lr_warmup_steps=20,
        enable_auto_lr=True,
        model=model,
    )
    return longest_walk(model, optimizer, scheduler, 100)


def test_a_sync_of_the_papers_method_on_two_ranks_walks_through_sixteen_files_at_most():
    for files in run_replicas(_one_cycle, 2):
        assert len(files) <= 16, files
        assert {"method/fan_out.py", "replicas/average.py", "method/controller.py"} <= set(files)

"""A sync is short: few calls of few functions that rarely leave their room."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.helpers.replicas import run_replicas

ROOT = str(Path(hdet.__file__).parent)
SYNC_EVERY = 5


class Walk(NamedTuple):
    """What a call walks through: functions of hdet, one entry for each call of one, as ``file:function``."""

    functions: list[str]
    num_room_changes: int

    @property
    def files(self) -> set[str]:
        return {function.split(":")[0] for function in self.functions}


def walk(call: Callable[[], Any]) -> Walk:
    """Follow a call. Comprehensions and generator expressions belong to the function that they stand in."""
    found: list[str] = []
    num_room_changes = 0

    def enter(frame: FrameType, event: str, _: Any) -> None:
        nonlocal num_room_changes
        if event == "call" and _is_of_hdet(frame):
            found.append(f"{_file(frame)}:{frame.f_code.co_name}")
            caller = frame.f_back
            while caller is not None and not _is_of_hdet(caller):
                caller = caller.f_back
            num_room_changes += caller is not None and _room(caller) != _room(frame)

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Walk(found, num_room_changes)


def _is_of_hdet(frame: FrameType) -> bool:
    name = frame.f_code.co_name
    return frame.f_code.co_filename.startswith(ROOT) and (name == "<lambda>" or not name.startswith("<"))


def _file(frame: FrameType) -> str:
    return str(Path(frame.f_code.co_filename).relative_to(ROOT))


def _room(frame: FrameType) -> str:
    """The top folder below src/hdet."""
    return _file(frame).split("/")[0]


def walks_of_syncs(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int
) -> list[Walk]:
    """Follow all syncs after a warm-up."""
    walks = []
    for step in range(1, steps + 1):
        loss = model(torch.randn(4, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        walked = walk(lambda loss=loss: scheduler.step(loss))
        if step % SYNC_EVERY == 0 and step > steps // 4:
            walks.append(walked)
    return walks


def test_a_sync_of_auto_lr_on_one_device_is_short_and_has_nothing_that_makes_replicas_differ():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    auto = hdet.AutoLR(optimizer, total_steps=1000, model=model, sync_every=SYNC_EVERY)
    walks = walks_of_syncs(model, optimizer, auto, 200)
    longest = max(walks, key=lambda each: len(each.functions))
    assert len(longest.functions) <= 60, longest.functions
    assert len(set(longest.functions)) <= 48, sorted(set(longest.functions))
    files = {file for each in walks for file in each.files}
    assert "replicas/copies.py" in files  # a copy for the guard is among the syncs
    assert not {"method/fan_out.py", "explore/tunable.py", "replicas/exchange.py"} & files


def _one_cycle(rank: int) -> list[Walk]:
    warnings.simplefilter("ignore")
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
    return walks_of_syncs(model, optimizer, scheduler, 100)


def test_a_sync_of_the_papers_method_on_two_ranks_is_short():
    for walks in run_replicas(_one_cycle, 2):
        for each in walks:
            assert len(each.functions) <= 110, each.functions
            assert len(set(each.functions)) <= 70, sorted(set(each.functions))
            assert each.num_room_changes <= 25, each.num_room_changes
            assert len(each.files) <= 16, each.files
            assert {"method/fan_out.py", "replicas/average.py", "method/controller.py"} <= each.files

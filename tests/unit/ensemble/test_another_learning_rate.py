"""A run that is resumed with another learning rate trains with it, and says so."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import hdet
from tests.helpers.models import Net, batch, loss_of

STEPS = 60


def run(lr: float, state: Any = None, end: int = STEPS) -> tuple[hdet.AutoLR, Any]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    auto = hdet.AutoLR(optimizer, total_steps=STEPS)
    parts = (net, optimizer, auto)
    for part, saved in zip(parts, copy.deepcopy(state or ()), strict=False):
        part.load_state_dict(saved)
    for step in range(auto.num_steps, end):
        loss = loss_of(net, batch(0, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)
    return auto, copy.deepcopy([part.state_dict() for part in parts])


def test_a_lower_learning_rate_is_kept_and_told() -> None:
    _, state = run(1e-3, end=30)
    with pytest.warns(hdet.HdetWarning, match=r"goes on with x0.25 of what the checkpoint has"):
        lower, state_of_lower = run(2.5e-4, state, end=31)
    same, _ = run(1e-3, state, end=31)
    assert lower.base["lr"] == pytest.approx(same.base["lr"] / 4)
    assert lower.found_lr["lr"] == pytest.approx(2.5e-4)
    again, _ = run(2.5e-4, state_of_lower, end=32)  # with the same one it goes on without a word
    assert again.found_lr["lr"] == pytest.approx(2.5e-4)


def test_an_answer_of_the_search_needs_no_second_search() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = [batch(0, step) for step in range(60)]
    found = hdet.find_lr(net, optimizer, data, loss_of, total_steps=STEPS, progress=False)
    auto = hdet.AutoLR(optimizer, total_steps=STEPS, found=found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, _ = run(1e-3, [net.state_dict(), optimizer.state_dict(), auto.state_dict()], end=1)
    assert again.found_lr == pytest.approx(auto.found_lr)


def test_groups_of_one_tunable_keep_their_proportions() -> None:
    def build(*lrs: float) -> hdet.Ensemble:
        groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in lrs]
        return hdet.Ensemble(torch.optim.SGD(groups), explore=[hdet.LearningRate(0.0, per_group=False)])

    state, other = build(0.1, 0.2).state_dict(), build(0.1, 0.1)
    with pytest.raises(ValueError, match="or all of them times one factor, got"):
        other.load_state_dict(state)
    assert other.base == {"lr": 0.1}

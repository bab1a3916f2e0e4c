"""Trials in one pass find what trials one after the other find, and give way where they cannot."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import hdet
from hdet.search import with_torch

SIZE = 16


def data(num_batches=60, size=SIZE):
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(num_batches, size, 6, generator=generator, dtype=torch.float64)
    return [(x, x[:, :2] * 2 + x[:, 2:4].square()) for x in xs]


def loss_of(model, pair):
    x, y = pair
    return (model(x) - y).square().mean()


def net(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 2)).double()


class Attention(nn.Module):
    """Has a buffer that it replaces and one that it changes, and keeps an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 2)).unbind(-3)
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
        self.kept = x
        return x + nn.functional.scaled_dot_product_attention(q, k, v).flatten(-2)


@pytest.fixture
def passes(monkeypatch):
    """Counts how often all trials were made in one pass."""
    made, train = [], with_torch.train_rows

    def counted(*args):
        made.append(train(*args))
        return made[-1]

    monkeypatch.setattr(with_torch, "train_rows", counted)
    return made


def one_after_the_other(monkeypatch):
    def fails(*_):
        raise RuntimeError("not in one pass")

    monkeypatch.setattr(with_torch, "train_rows", fails)


def found_with(model, kind=torch.optim.AdamW, loss=loss_of, batches=None, lr=0.01, **settings):
    """Search, and see that everything is as it was."""
    optimizer = kind(model.parameters(), lr=lr)
    held = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in held]
    generator = torch.random.get_rng_state()
    found = hdet.find_lr(model, optimizer, batches or data(), loss, total_steps=300, **settings)
    assert all(torch.equal(tensor, value) for tensor, value in zip(held, before, strict=True))
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters()) and not optimizer.state
    assert all(module.training for module in model.modules())
    return found


def frozen():
    model = net(nn.Tanh())
    model[0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "build, settings",
    [
        (lambda: net(nn.Tanh()), {}),
        (lambda: net(nn.Tanh()), {"clip_norm": 0.1, "probe": [data()[3]]}),
        (lambda: net(nn.GELU(), nn.Dropout(0.2)), {"kind": torch.optim.Adam}),
        (lambda: net(nn.BatchNorm1d(8), nn.ReLU()), {"batches": data(size=64)}),
        (lambda: net(nn.LayerNorm(8), Attention()), {}),
        (frozen, {}),
        (
            lambda: net(nn.Tanh()),
            {"kind": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.01)},
        ),
    ],
    ids=["plain", "clipped", "dropout", "batch norm", "buffers", "frozen", "momentum"],
)
def test_trials_in_one_pass_score_as_those_that_are_made_by_themselves(build, settings, passes, monkeypatch):
    at_once = found_with(build(), **settings)
    assert passes
    one_after_the_other(monkeypatch)
    alone = found_with(build(), **settings)
    assert at_once.lr == pytest.approx(alone.lr, rel=1e-6)
    scores, expected = ([score for _, score in found.trials] for found in (at_once, alone))
    assert scores == pytest.approx(expected, rel=1e-6)
    assert at_once.num_steps == alone.num_steps


def reads_a_number(model, pair):
    loss = loss_of(model, pair)
    return loss * (1.0 if loss.item() > -1 else 2.0)


def has_a_hook(model):
    model[0].weight.register_hook(lambda gradient: 0 * gradient)
    return model


def clipping(parameters, lr):
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    values = optimizer.param_groups[0]["params"]
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(values, 0.01))
    return optimizer


def of_captured(model):
    captured = list(model.parameters())
    return lambda m, pair: loss_of(m, pair) + 0.1 * sum(p.square().sum() for p in captured)


@pytest.mark.parametrize(
    "build, settings",
    [
        (lambda: net(nn.Tanh()), {"kind": torch.optim.RMSprop}),
        (lambda: net(nn.Tanh()), {"kind": clipping}),
        (lambda: net(nn.Tanh()), {"loss": reads_a_number}),
        (lambda: has_a_hook(net(nn.Tanh())), {}),
        (lambda: net(nn.Tanh()), {"loss": of_captured}),
        (lambda: net(nn.Tanh()), {"batches": data(size=8 * 4 + 1)}),
    ],
    ids=["optimizer", "hook of optimizer", "number", "hook of parameter", "captured", "uneven parts"],
)
def test_what_cannot_be_made_in_one_pass_is_made_by_itself(build, settings, passes, monkeypatch):
    def found():
        model, chosen = build(), dict(settings)
        if chosen.get("loss") is of_captured:
            chosen["loss"] = of_captured(model)
        return found_with(model, **chosen)

    first = found()
    assert not passes
    one_after_the_other(monkeypatch)
    assert found() == first


def test_a_trial_whose_loss_is_not_finite_is_made_again_by_itself(passes, monkeypatch):
    spoilt = data()
    spoilt[41] = (spoilt[41][0].index_fill(0, torch.tensor([0]), math.nan), spoilt[41][1])
    at_once = found_with(net(nn.Tanh()), batches=spoilt)
    (_, are_finite), *_ = passes
    assert are_finite == 2 * [False] + 6 * [True]  # two trials share the four examples
    one_after_the_other(monkeypatch)
    alone = found_with(net(nn.Tanh()), batches=spoilt)
    assert "left out" in at_once.reason and at_once.reason == alone.reason
    assert [s for _, s in at_once.trials] == pytest.approx([s for _, s in alone.trials], rel=1e-6)

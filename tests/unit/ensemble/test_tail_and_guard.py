"""Where the tail, the guard and copies meet."""

from __future__ import annotations

import torch
from torch import nn

import hdet


def test_a_run_that_went_back_within_the_tail_forgets_what_it_took():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    guard = hdet.Guard(interval=0.1)
    ensemble = hdet.Ensemble(
        optimizer,
        explore=[hdet.LearningRate(0.0)],
        sync_every=2,
        total_steps=100,
        controllers=[guard],
        average_tail=0.5,
    )
    for step in range(100):
        optimizer.step()
        if step in (60, 61, 62, 63):
            with torch.no_grad():
                weight.fill_(1e6)
        ensemble.step(4.0 - 0.03 * step if weight.item() == 1 else 100.0)
    assert ensemble.controllers.state_dict()["guard"]["num_brakes"] == 1
    assert weight.item() == 1.0


def test_real_and_complex_parameters_share_a_tail():
    real, imaginary = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(4, dtype=torch.complex64))
    optimizer = torch.optim.SGD([real, imaginary], lr=0.1)
    auto = hdet.AutoLR(optimizer, total_steps=60)
    for _ in range(60):
        loss = real.square().sum() + imaginary.abs().square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)
    assert real.item() < 0.1 and imaginary.abs().max().item() < 0.1


def test_a_search_puts_back_parameters_that_the_model_does_not_hold():
    torch.manual_seed(0)
    model, scale = nn.Linear(4, 1), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=1e-3)
    data = [torch.randn(16, 4) for _ in range(10)]
    before = [p.detach().clone() for p in model.parameters()]
    hdet.find_lr(
        model, optimizer, data, lambda m, x: (scale * m(x) - x.sum(1, True)).square().mean(), total_steps=200
    )
    assert scale.item() == 1.0
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))

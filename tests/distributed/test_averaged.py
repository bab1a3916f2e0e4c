"""The mean of the tail in place for an evaluation, on ranks that keep a part of it each."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.helpers.replicas import run_replicas

STEPS, TAIL = 60, 4


def _train(rank, looks):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, sync_every=7)
    taken, seen = [], []
    for step in range(STEPS):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        taken.append([p.detach().clone() for p in model.parameters()])
        auto.step(loss)
        if looks and step >= STEPS - TAIL - 1 and step < STEPS - 1:
            with auto.averaged():
                seen.append([p.detach().clone() for p in model.parameters()])
            assert all(torch.equal(a, b) for a, b in zip(taken[-1], model.parameters(), strict=True))
    means = [
        [torch.stack(ps).mean(dim=0) for ps in zip(*taken[STEPS - TAIL : STEPS - TAIL + n], strict=True)]
        for n in range(1, TAIL)
    ]
    are_means = [
        torch.allclose(a, b, atol=1e-6)
        for one, mean in zip(seen, [taken[STEPS - TAIL - 1], *means], strict=looks)
        for a, b in zip(one, mean, strict=True)
    ]
    return all(are_means), len(are_means), [p.detach() for p in model.parameters()]


def test_an_evaluation_within_the_tail_changes_nothing_else():
    looked, plain = run_replicas(_train, 2, True), run_replicas(_train, 2, False)
    for (are_means, count, end), (_, _, other) in zip(looked, plain, strict=True):
        assert are_means and count == 4 * TAIL
        assert all(torch.equal(a, b) for a, b in zip(end, other, strict=True))

"""Replicas that differ and were told to share gradients must do so."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.helpers.models import Net, batch, loss_of
from tests.helpers.replicas import run_replicas


def _train(rank: int, is_wrapped: bool, scale: float) -> str:
    """Gradients may be scaled in place by a replica's own values, as some optimizers do."""
    net = Net()
    model = DistributedDataParallel(net) if is_wrapped else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    ensemble = hdet.Ensemble(optimizer, model=model, explore=[hdet.LearningRate(0.1)], sync_every=5)
    try:
        for step in range(20):
            loss = loss_of(model, batch(rank, step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for p in net.parameters():
                assert p.grad is not None
                p.grad.mul_(1 + scale * rank)
            ensemble.step(loss)
    except hdet.ReplicasDifferError as error:
        return str(error)
    return ""


def test_a_model_without_ddp_is_told_at_the_first_sync_also_with_a_spread() -> None:
    messages = run_replicas(_train, 2, False, 0.0)
    assert messages[0] == messages[1]
    assert "at step 5 replicas must share their gradients, but they differ" in messages[0]
    assert "DistributedDataParallel" in messages[0]


@pytest.mark.parametrize("scale", [0.0, 0.1])
def test_gradients_that_are_shared_are_not_told(scale: float) -> None:
    assert run_replicas(_train, 2, True, scale) == ["", ""]

"""Ranks that do not fit together are told so on every rank, before anything changes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.helpers.ranks import message_of, of_both
from tests.helpers.replicas import run_replicas


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def data():
    return [torch.randn(16, 4) for _ in range(20)]


def _built(rank, what, door):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    parameters = list(model.parameters())
    lr, decay, kind = 0.01, 0.1, torch.optim.AdamW
    if rank and what == "order":
        parameters = parameters[::-1]
    elif rank and what == "lr":
        lr = 0.02
    elif rank and what == "weight_decay":
        decay = 0.2
    elif rank and what == "optimizer":
        kind = torch.optim.SGD
    optimizer = kind(parameters, lr=lr, weight_decay=decay)
    before = [p.clone() for p in model.parameters()]

    def build():
        if door == "find_lr":
            hdet.find_lr(model, optimizer, data(), loss_of, total_steps=100)
        elif door == "AutoLR":
            hdet.AutoLR(optimizer, total_steps=100, model=model)
        else:
            hdet.Ensemble(optimizer, model=model)

    told = message_of(hdet.ConfigurationMismatchError, build)
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))
    assert optimizer.param_groups[0]["lr"] == lr
    return told


@pytest.mark.parametrize("door", ["Ensemble", "AutoLR", "find_lr"])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("order", "these differ: parameters (replica 0: '2 tensors, 32 elements, layout"),
        ("lr", "lr of group 0 (replica 0: 0.01, replica 1: 0.02)"),
        ("weight_decay", "weight_decay of group 0 (replica 0: 0.1, replica 1: 0.2)"),
        ("optimizer", "optimizer (replica 0: 'AdamW', replica 1: 'SGD')"),
    ],
)
def test_optimizers_that_differ_between_ranks_are_named(what, words, door):
    first, second = run_replicas(_built, 2, what, door)
    assert first == second and words in first


def _ends(rank, when):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kept, num_calls = data(), 0
    batches = iter(kept * 3) if rank and when == "data" else kept

    def loss(model, x):
        nonlocal num_calls
        num_calls += 1
        if rank and num_calls > 40 and when == "loss":
            raise RuntimeError("out of order")
        return loss_of(model, x)

    kinds = (hdet.ReplicaMissingError, ValueError, RuntimeError)
    return message_of(kinds, lambda: hdet.find_lr(model, optimizer, batches, loss, total_steps=1000))


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("data", "batches must have at least one batch, or be able to start over"),
        ("loss", "out of order"),
    ],
)
def test_a_rank_that_fails_in_the_search_is_named_on_the_others(when, words):
    waiting, failed = run_replicas(_ends, 2, when)
    assert failed.startswith(words)
    assert waiting.startswith("replica 1 has failed (") and words in waiting


def _sparse_search(rank):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randint(10, (16,)) for _ in range(10)]
    return message_of(ValueError, lambda: hdet.find_lr(model, optimizer, batches, loss_of, total_steps=100))


def test_sparse_gradients_are_refused_by_a_search_on_several_ranks():
    must = "model must have dense gradients on several ranks, got sparse ones: set sparse=False"
    assert run_replicas(_sparse_search, 2) == [must] * 2


def _sparse_gradients(rank, is_bad):
    model = DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    model.register_comm_hook(None, hdet.finite_mean_hook)
    scale = float("nan") if rank and is_bad else 1.0
    (model(torch.tensor([rank, 2])).sum() * scale).backward()
    gradient = model.module.weight.grad.to_dense()
    one, other = of_both(gradient)
    assert torch.equal(one, other) and dist.get_world_size() == 2
    return gradient[:, 0].tolist()


@pytest.mark.parametrize(("is_bad", "mean"), [(False, [0.5, 0.5, 1.0, 0.0]), (True, [1.0, 0.0, 1.0, 0.0])])
def test_the_finite_mean_takes_sparse_gradients(is_bad, mean):
    assert run_replicas(_sparse_gradients, 2, is_bad) == [mean] * 2

"""A replica that does not come, or cannot be built, is named on the others."""

from __future__ import annotations

import logging
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.helpers.models import Net, batch
from tests.helpers.replicas import run_replicas


def _trains(rank, skips_at=None, sleeps_at=None, patience=1.0, limit=30):
    """The last rank skips a call of step(), or comes late to a sync."""
    group = dist.new_group(timeout=timedelta(seconds=limit))
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("hdet").addHandler(handler)
    net = Net()  # no DDP: then nobody waits anywhere else. The same batch gives nearly the same gradient.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    ensemble = hdet.Ensemble(
        optimizer,
        explore=[hdet.LearningRate(0.1)],
        sync_every=5,
        total_steps=20,
        replicas=group,
        patience=patience,
    )
    try:
        for step in range(20):
            x, y = batch(0, step)
            loss = (net(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 2 and step == skips_at:
                time.sleep(20)  # it does not come before the others have given up
                return "skipped", logged
            if rank == 2 and step == sleeps_at:
                time.sleep(5)
            ensemble.step(loss)
    except hdet.ReplicaMissingError as error:
        return str(error), logged
    return "done", logged


def test_a_replica_that_does_not_come_is_named_and_the_others_raise():
    *waited, _ = run_replicas(_trains, 3, 9)
    for message, _ in waited:  # on a busy machine the other one may look silent too
        assert re.search(r"2\]? did not come to the sync at step 10; the others wait since", message)
        assert "data that ends earlier" in message
    assert any("2 did not come to the sync at step 10" in text for _, logged in waited for text in logged)


def test_a_replica_that_comes_late_is_named_and_the_run_goes_on():
    found = run_replicas(_trains, 3, None, 9)
    assert [message for message, _ in found] == ["done"] * 3
    logged = [text for _, texts in found for text in texts]
    assert any("replica 2 did not come to the sync at step 10" in text for text in logged)


@pytest.mark.parametrize("patience", [1.0, 30.0])
def test_the_time_limit_of_the_process_group_ends_the_waiting(patience):
    *waited, _ = run_replicas(_trains, 3, 9, None, patience, 4)
    for message, _ in waited:
        assert "sync at step 10 is not complete within the time limit of its process group" in message
        assert "data that ends earlier" in message


def _builds(rank, what):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    bad = rank == 1
    model = DistributedDataParallel(net)
    try:
        if what == "ensemble":
            hdet.Ensemble(optimizer, model=model, sync_every=0 if bad else 5)
        elif what == "auto":
            hdet.AutoLR(optimizer, model=model, total_steps=-1 if bad else 100)
        else:
            hdet.find_lr(
                model,
                optimizer,
                [torch.ones(2, 3)],
                nn.Module(),
                total_steps=3 if bad else 100,  # type: ignore
            )
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("ensemble", "sync_every must be an integer of at least 1, got 0"),
        ("auto", "total_steps must be an integer of at least 1, got -1"),
        ("find", "total_steps must be an integer of at least 50, got 3"),
    ],
)
def test_a_bad_argument_on_one_rank_is_an_error_on_all(what, words):
    others, own = run_replicas(_builds, 2, what)
    assert words in own
    assert f"replica 1 could not be built: ValueError: {words}" in others

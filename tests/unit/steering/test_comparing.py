"""The controller that compares replicas: what a user is told where it cannot go on."""

from __future__ import annotations

import pytest
import torch

import hdet
from tests.helpers.models import linear, mean_square


@pytest.mark.parametrize("form", ["paper", "log"])
def test_a_controller_with_one_replica_is_told(form: str):
    _, optimizer = linear()
    with pytest.warns(
        hdet.HdetWarning, match="with one replica: only its decay acts. Train on several ranks"
    ):
        hdet.Ensemble(optimizer, controllers=[hdet.Controller(form=form)])


def weights_alone(loss):
    """A probe whose score does not depend on data."""
    return hdet.Probe([torch.zeros(1)], lambda model, _: loss(model.weight))


def test_a_controller_that_reaches_its_limit_is_told():
    model, optimizer = linear()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    ensemble = hdet.VirtualEnsemble(
        model,
        optimizer,
        mean_square,
        num_replicas=4,
        sync_every=1,
        explore=[hdet.WeightDecay(3.0, scale="log")],
        controllers=[hdet.Controller(step_size=1.0, momentum=0.0, max_correction=2.0)],
        probe=weights_alone(lambda weight: weight.square().sum()),  # more decay is always better
    )
    with pytest.warns(hdet.HdetWarning, match=r"moved weight_decay to 0\.2, the limit of max_correction=2"):
        for _ in range(10):
            ensemble.step(torch.ones(4, 3))


def test_bounds_that_stop_a_controller_are_told():
    model, optimizer = linear()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    ensemble = hdet.VirtualEnsemble(
        model,
        optimizer,
        mean_square,
        num_replicas=4,
        sync_every=1,
        explore=[hdet.WeightDecay(0.5, bounds=(0.0, 0.15))],
        controllers=[hdet.Controller(step_size=1.0, momentum=0.0)],
        probe=weights_alone(lambda weight: weight.square().sum()),
    )
    with pytest.warns(hdet.HdetWarning, match="the limit of its bounds"):
        for _ in range(30):
            ensemble.step(torch.ones(4, 3))


def test_a_base_that_had_to_be_halved_is_in_the_records():
    model, optimizer = linear()
    first, records = model.weight.detach().clone(), hdet.Records()
    ensemble = hdet.VirtualEnsemble(
        model,
        optimizer,
        mean_square,
        num_replicas=2,
        sync_every=1,
        explore=[hdet.LearningRate(0.9)],
        controllers=[hdet.Controller(form="paper", step_size=1.0, momentum=0.0, temperature=1e-9)],
        probe=weights_alone(lambda weight: (weight - first).abs().sum()),  # the lowest learning rate wins
        records=records,
    )
    for _ in range(3):
        ensemble.step(torch.ones(4, 3))
    assert any(
        "must stay above zero" in record.controllers["comparing"].limited.get("lr", "") for record in records
    )
    assert all(record.base["lr"] > 0 for record in records)

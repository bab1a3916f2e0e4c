"""Parameters that are added, replaced or frozen after an ensemble was built."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hdet
from tests.helpers.models import linear, mean_square, train_linear


def ensembles(model: nn.Module, optimizer: torch.optim.Optimizer):
    """Build one of each kind, as a function that makes a step."""
    batch = torch.ones(4, 3)

    def stepping(scheduler):
        return lambda: train_linear(model, optimizer, scheduler, 1)

    virtual = hdet.VirtualEnsemble(model, optimizer, mean_square, num_replicas=2, sync_every=3)
    yield lambda: virtual.step(batch)
    virtual.close()
    cycle = {"max_lr": 0.1, "total_steps": 20}
    settings = {"explore": [hdet.LearningRate(0.0)], "average_tail": 0.5, "total_steps": 6}
    for build_one in (
        lambda: hdet.AutoLR(optimizer, total_steps=20, model=model, sync_every=3),
        lambda: hdet.Ensemble(optimizer, model=model, sync_every=3, controllers=[hdet.Controller()]),
        lambda: hdet.Ensemble(optimizer, model=model, **settings),  # no rounds, but a tail
        lambda: hdet.OneCycleAutoLR(
            optimizer, model=model, model_sync_interval=3, records=hdet.Records(), **cycle
        ),
    ):
        with build_one() as scheduler:
            yield stepping(scheduler)


@pytest.mark.filterwarnings("ignore:the controller has nothing to compare")
@pytest.mark.parametrize("which", range(5))
def test_a_parameter_group_that_is_added_later_is_noticed_at_the_step(which: int):
    model, optimizer = linear()
    for i, step in enumerate(ensembles(model, optimizer)):
        if i == which:
            step()
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
            with pytest.raises(
                hdet.HdetError,
                match="1 parameter groups when the ensemble was built, but it has 2 now: build the ensemble",
            ):
                step()
            return


@pytest.mark.filterwarnings("ignore:the controller has nothing to compare")
@pytest.mark.parametrize("which", range(5))
def test_a_layer_that_is_replaced_is_noticed_at_the_sync(which: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for i, step in enumerate(ensembles(model, optimizer)):
        if i == which:
            step()
            model[1] = nn.Linear(3, 1)
            with pytest.raises(
                hdet.HdetError, match=r"2 parameters of the model were replaced .*: build the optimizer and"
            ):
                for _ in range(3):
                    step()
            return


def test_parameters_may_be_frozen_and_read_again_during_a_run():
    model, optimizer = linear()
    auto = hdet.AutoLR(optimizer, total_steps=10, model=model, sync_every=2)
    train_linear(model, optimizer, auto, 3)
    model.bias.requires_grad_(False)
    optimizer.load_state_dict(optimizer.state_dict())
    model.load_state_dict(model.state_dict())
    train_linear(model, optimizer, auto, 3)
    model.bias.requires_grad_(True)
    model.teacher = nn.Linear(3, 1).requires_grad_(False)
    train_linear(model, optimizer, auto, 4)
    assert auto.num_steps == 10

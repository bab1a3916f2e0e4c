"""Checkpoints of torch.distributed.checkpoint around an ensemble."""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.helpers.models import Net, batch, make_optimizer, parameter_groups
from tests.helpers.replicas import run_replicas


def build(optimizer_name: str) -> tuple[nn.Module, torch.optim.Optimizer, hdet.Ensemble]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = make_optimizer(optimizer_name, parameter_groups(model, 1))
    ensemble = hdet.Ensemble(optimizer, model=model, explore=[hdet.LearningRate(0.2)], sync_every=5)
    return model, optimizer, ensemble


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, ensemble: hdet.Ensemble, rank: int, steps: range
) -> None:
    for step in steps:
        x, y = batch(rank, step)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, ensemble: hdet.Ensemble) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)  # makes an empty step where it has to
    return {"model": model_state, "optimizer": optimizer_state, "ensemble": ensemble.state_dict()}


def _save_and_load(rank: int, optimizer_name: str, folder: str) -> tuple[list[str], list[int], list[bool]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = build(optimizer_name)
        train(*run, rank, range(8))
        run[2].converge()
        dcp.save(state_of(*run), checkpoint_id=folder)
        train(*run, rank, range(8, 15))
        expected = [p.detach() for p in run[0].parameters()]
        counts, are_equal = [], []
        for ensemble_comes_first in (False, True):
            model, optimizer, ensemble = build(optimizer_name)
            state = state_of(model, optimizer, ensemble)
            dcp.load(state, checkpoint_id=folder)
            saved = copy.deepcopy(state)  # which set_state_dict empties
            if ensemble_comes_first:
                ensemble.load_state_dict(saved["ensemble"])
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            if not ensemble_comes_first:
                ensemble.load_state_dict(saved["ensemble"])
            ensemble.state_dict()
            train(model, optimizer, ensemble, rank, range(8, 15))
            counts.append(ensemble.num_steps)
            are_equal += [
                torch.equal(a, b.detach()) for a, b in zip(expected, model.parameters(), strict=True)
            ]
    return [str(w.message) for w in caught if issubclass(w.category, hdet.HdetWarning)], counts, are_equal


@pytest.mark.parametrize("optimizer_name", ["sgd", "adamw"])
def test_a_distributed_checkpoint_goes_on_without_a_warning(optimizer_name: str, tmp_path: Path) -> None:
    for told, counts, are_equal in run_replicas(_save_and_load, 2, optimizer_name, str(tmp_path)):
        assert told == []
        assert counts == [15, 15]
        assert all(are_equal)


def _new_but_apart(rank: int) -> list[str]:
    model = Net()
    hdet.warm_start(model, 0.1)
    ensemble = hdet.Ensemble(torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ensemble.state_dict()
    return [w.category.__name__ for w in caught]


def test_a_perturbed_start_still_warns() -> None:
    assert run_replicas(_new_but_apart, 2) == [["NotConvergedWarning"]] * 2


def _load(rank: int, state: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("hdet.ensemble")
    logger.addHandler(handler)
    try:
        build("sgd")[2].load_state_dict(state)
    finally:
        logger.removeHandler(handler)
    return lines


def _state(rank: int) -> dict[str, Any]:
    return build("sgd")[2].state_dict()


def test_another_number_of_replicas_is_told_once() -> None:
    state = run_replicas(_state, 2)[0]
    assert run_replicas(_load, 2, state) == [[], []]
    first, *others = run_replicas(_load, 3, state)
    assert len(first) == 1 and first[0].startswith("step 0: a checkpoint of 2 replicas is loaded into 3, so")
    assert others == [[], []]

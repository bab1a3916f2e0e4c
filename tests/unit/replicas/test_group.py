import warnings

import pytest
import torch

import hdet
from hdet.replicas import ReplicaGroup, group
from tests.helpers.models import linear, mean_square


@pytest.fixture(autouse=True)
def _nobody_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_told", set())


def test_processes_that_do_not_know_of_each_other_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.warns(
        hdet.HdetWarning, match="WORLD_SIZE=4 .* each trains alone, .*init_process_group"
    ) as seen:
        assert ReplicaGroup.of(None) == ReplicaGroup.of(None) == ReplicaGroup(0, 1)
    assert len(seen) == 1


@pytest.mark.parametrize(
    "environment", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "many"}, {"WORLD_SIZE": "4", "RANK": "3"}]
)
def test_a_process_alone_and_other_ranks_say_nothing(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ReplicaGroup.of(None).count == 1


def test_replicas_that_are_no_process_group_are_called_replicas():
    model, optimizer = linear()
    words = "^replicas must be None while torch.distributed is not running, got 'all': call"
    with pytest.raises(ValueError, match=words):
        hdet.Ensemble(optimizer, replicas="all")
    with pytest.raises(ValueError, match=words):
        hdet.AutoLR(optimizer, total_steps=100, model=model, replicas="all")
    with pytest.raises(ValueError, match=words):
        hdet.find_lr(model, optimizer, [torch.ones(4, 3)], mean_square, total_steps=100, replicas="all")

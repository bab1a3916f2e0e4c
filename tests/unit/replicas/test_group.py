import warnings

import pytest

import hdet
from hdet.replicas import ReplicaGroup, group


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

"""Scripted faults do what their names say."""

from __future__ import annotations

import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.faults import Fault, Faults
from tests.helpers.models import Net, batch
from tests.helpers.replicas import forkserver, run_replicas


def alone(kind: str, **settings) -> Faults:
    return Faults([Fault(kind, replica=0, step=3, **settings)], replica=0)


def test_parameters_change_at_their_step_only() -> None:
    model = nn.Linear(2, 1)
    faults = alone("scaled_parameters", factor=100.0)
    before = model.weight.detach().clone()
    faults.before_step(2, model)
    assert torch.equal(model.weight, before)
    faults.before_step(3, model)
    torch.testing.assert_close(model.weight, before * 100)
    alone("nan_parameters").before_step(3, model)
    assert all(torch.isnan(p).all() for p in model.parameters())


def test_other_replicas_are_spared() -> None:
    model = nn.Linear(2, 1)
    Faults([Fault("nan_parameters", replica=1, step=3)], replica=0).before_step(3, model)
    assert torch.isfinite(model.weight).all()


def test_what_has_happened_does_not_happen_again(tmp_path: Path) -> None:
    fault = Fault("nan_loss", replica=0, step=3)
    for expected in ([False, True, False], [False] * 3):  # the second time after a restart
        faults = Faults([fault], replica=0, happened=tmp_path)
        seen = [bool(torch.isnan(faults.loss(step, torch.tensor(1.0)))) for step in range(2, 5)]
        assert seen == expected


def _save(path: Path) -> None:
    with alone("kill_while_saving", num_bytes=600).saving(3):
        torch.save(torch.zeros(1000), path)


def _killed() -> None:
    alone("kill").before_step(3, nn.Linear(2, 1))


def _exit_code(function, *args) -> int | None:
    process = forkserver().Process(target=function, args=args)
    process.start()
    process.join(60)
    return process.exitcode


def test_kills_end_the_process(tmp_path: Path) -> None:
    assert _exit_code(_killed) == 1
    assert _exit_code(_save, tmp_path / "file.pt") == -signal.SIGXFSZ
    assert (tmp_path / "file.pt").stat().st_size == 600


def _gradients(rank: int, kind: str) -> list[bool]:
    model = DistributedDataParallel(Net())
    faults = Faults([Fault(kind, replica=1, step=0)], replica=dist.get_rank())
    x, y = batch(rank, 0)
    faults.loss(0, (model(x) - y).square().mean()).backward()
    faults.after_backward(0, model)
    return [bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None]


def test_a_nan_loss_reaches_all_and_nan_gradients_only_one() -> None:
    assert run_replicas(_gradients, 2, "nan_loss") == [[False] * 4] * 2
    assert run_replicas(_gradients, 2, "nan_gradients") == [[True] * 4, [False] * 4]

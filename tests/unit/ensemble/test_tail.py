"""The mean of the weights over the last steps takes their place after the last one."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.method.recipe import tail_steps
from hdet.replicas.tail import TailMean


def build(total_steps: int | None = 10, **settings: Any) -> tuple[nn.Module, Any, hdet.Ensemble]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, hdet.Ensemble(optimizer, model=model, total_steps=total_steps, **settings)


def train(model: nn.Module, optimizer: Any, ensemble: hdet.Ensemble, steps: range) -> list[dict[str, Any]]:
    """The state before every call of step()."""
    states = []
    for t in steps:
        loss = model(torch.randn(5, 3, generator=torch.Generator().manual_seed(t))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        ensemble.step(loss)
    return states


@pytest.mark.parametrize("has_rounds", [True, False])
def test_the_final_weights_are_the_mean(has_rounds: bool) -> None:
    records = hdet.Records() if has_rounds else None
    explore = [hdet.LearningRate(0.0)]
    model, optimizer, ensemble = build(average_tail=0.3, records=records, explore=explore, sync_every=4)
    states = train(model, optimizer, ensemble, range(10))
    for name, value in model.state_dict().items():
        taken = torch.stack([state[name] for state in states[-3:]])
        is_parameter = name in dict(model.named_parameters())  # buffers stay as they are
        torch.testing.assert_close(value, taken.mean(dim=0) if is_parameter else taken[-1])
    assert not torch.equal(next(model.parameters()), states[-1]["0.weight"])
    if records is not None:
        assert [r.num_averaged_steps for r in records] == [0, 0, 3]


def test_without_a_tail_the_last_weights_stay() -> None:
    model, optimizer, ensemble = build()
    states = train(model, optimizer, ensemble, range(10))
    assert all(torch.equal(value, states[-1][name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("stop_at", [5, 8])
def test_resume_ends_in_the_same_bits(stop_at: int) -> None:
    model, optimizer, ensemble = build(average_tail=0.5)
    train(model, optimizer, ensemble, range(stop_at))
    saved = {"model": model.state_dict(), "ensemble": ensemble.state_dict()}
    again, other, resumed = build(average_tail=0.5)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["ensemble"])
    train(model, optimizer, ensemble, range(stop_at, 10))
    train(again, other, resumed, range(stop_at, 10))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert ensemble.state_dict()["tail"] is None  # over


def test_a_mean_that_is_not_finite_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, ensemble = build(average_tail=0.5, explore=[hdet.LearningRate(0.0)])
    train(model, optimizer, ensemble, range(7))
    weight = next(model.parameters())
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(math.nan)
    optimizer.step()
    ensemble.step()
    with torch.no_grad():
        weight.copy_(kept)
    with caplog.at_level(logging.WARNING):
        states = train(model, optimizer, ensemble, range(8, 10))
    assert "the mean of the tail is not finite" in caplog.text
    assert torch.equal(weight, states[-1]["0.weight"])


def test_a_tail_of_a_shorter_run_is_not_taken_over() -> None:
    model, optimizer, ensemble = build(average_tail=0.5)
    train(model, optimizer, ensemble, range(8))
    records = hdet.Records()
    again, other, longer = build(20, average_tail=0.2, records=records)
    again.load_state_dict(model.state_dict())
    longer.load_state_dict(ensemble.state_dict())
    states = train(again, other, longer, range(8, 20))
    assert records[-1].num_averaged_steps == 4
    mean = torch.stack([state["0.weight"] for state in states[-4:]]).mean(dim=0)
    torch.testing.assert_close(again.state_dict()["0.weight"], mean)


def test_finish_ends_a_run_whose_steps_were_skipped() -> None:
    model, optimizer, ensemble = build(average_tail=0.5)
    states = train(model, optimizer, ensemble, range(9))
    ensemble.step(skipped=True)
    mean = torch.stack([state["0.weight"] for state in states[-4:]]).mean(dim=0)
    for _ in range(2):  # the second time there is nothing to do
        ensemble.finish()
        torch.testing.assert_close(model.state_dict()["0.weight"], mean)


def test_half_precision_is_averaged_in_full() -> None:
    tail = TailMean([torch.zeros(1, dtype=torch.bfloat16)])
    for t in range(1, 513):
        tail.take([torch.full((1,), 1.0 + t / 512, dtype=torch.bfloat16)], t)
    assert tail.mean[0].item() == pytest.approx(1.501, abs=1e-3)
    weight = torch.zeros(1, dtype=torch.bfloat16)
    tail.put([weight])
    assert weight.item() == 1.5


@pytest.mark.parametrize("total_steps", [1, 7, 100, 1707, 1_000_000])
@pytest.mark.parametrize("share", [0.001, 0.075, 0.5, 1.0])
def test_the_steps_of_a_tail(total_steps: int, share: float) -> None:
    steps = tail_steps(total_steps, share)
    length = max(1, round(share * total_steps))
    assert min(64, length) <= len(steps) < 128
    assert steps[-1] == total_steps and steps[0] > total_steps - length


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"average_tail must be a number in \[0, 1\), got 1"):
        build(average_tail=1)
    with pytest.raises(ValueError, match="total_steps must be given to average the tail of the run"):
        build(total_steps=None, average_tail=0.1)


@pytest.mark.parametrize("num_steps", [4, 8, 10], ids=["before the tail", "within it", "after the end"])
def test_an_evaluation_before_the_end_sees_the_mean_so_far(num_steps: int) -> None:
    model, optimizer, ensemble = build(average_tail=0.5)
    states = train(model, optimizer, ensemble, range(num_steps))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tail = states[5:] if num_steps == 8 else []
    with pytest.raises(KeyboardInterrupt), ensemble.averaged():
        for name, p in model.named_parameters():
            mean = torch.stack([state[name] for state in tail]).mean(dim=0) if tail else before[name]
            torch.testing.assert_close(p.detach(), mean)
        raise KeyboardInterrupt
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

    plain, plain_optimizer, plain_ensemble = build(average_tail=0.5)
    train(plain, plain_optimizer, plain_ensemble, range(10))
    train(model, optimizer, ensemble, range(num_steps, 10))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def _run(num_steps: int, total_steps: int = 100, average_tail: float = 0.1) -> hdet.Ensemble:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    ensemble = hdet.Ensemble(optimizer, total_steps=total_steps, average_tail=average_tail)
    for _ in range(num_steps):
        optimizer.step()
        ensemble.step(1.0)
    return ensemble


def test_a_run_that_ends_before_its_tail_is_told_and_so_is_training_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ensemble = _run(1)
    ensemble.finish()
    assert "step 1 of 100: finish() ends the run before its tail" in caplog.text
    ensemble.optimizer.step()
    with pytest.warns(hdet.HdetWarning, match=r"after finish\(\), which ended the run at step 1"):
        ensemble.step(1.0)


@pytest.mark.parametrize(("num_steps", "average_tail"), [(95, 0.1), (100, 0.1), (5, 0.0)])
def test_nothing_is_told_where_nothing_is_lost(
    num_steps: int, average_tail: float, caplog: pytest.LogCaptureFixture
) -> None:
    ensemble = _run(num_steps, average_tail=average_tail)
    ensemble.finish()
    ensemble.finish()
    if not average_tail:
        ensemble.optimizer.step()
        ensemble.step(1.0)
    assert not caplog.text


def test_a_checkpoint_of_a_run_of_another_length_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def build(total_steps: int) -> hdet.AutoLR:
        return hdet.AutoLR(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), total_steps=total_steps)

    state = build(100).state_dict()
    build(100).load_state_dict(state)
    earlier = {name: value for name, value in state.items() if name != "total_steps"}
    build(200).load_state_dict(earlier)
    assert not caplog.text
    build(200).load_state_dict(state)
    assert "the checkpoint is of a run of 100 steps, and this one has 200" in caplog.text
    with pytest.raises(ValueError, match="state_dict total_steps must be"):
        build(100).load_state_dict(state | {"total_steps": -1})

"""Real gloo replicas under DDP equal the reference: values, weights, signals, velocities, parameters."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.method import reference
from hdet.round_record import ComparingRecord
from tests.helpers.models import Net, batch, make_optimizer, parameter_groups, predict
from tests.helpers.replicas import run_replicas

TOTAL, EVERY, START, SPREAD, SEED = 40, 5, 10, 1 / 9, 3
# A final_div_factor that is larger than div_factor makes the printed decay grow; a factor of 4 keeps it sane.
CYCLE: dict[str, Any] = {
    "total_steps": TOTAL,
    "cycle_momentum": False,
    "div_factor": 5.0,
    "final_div_factor": 20.0,
}
MAX_LR = {1: [0.02], 4: [0.02, 0.01, 0.03, 0.015]}
OPTIMIZERS = {
    "sgd": reference.sgd(),
    "momentum": reference.sgd(momentum=0.9),
    "adam": reference.adam(),
    "adamw": reference.adam(decoupled_weight_decay=0.1),
}
RULES: dict[str, dict[str, Any]] = {
    "paper": {"end": 0.22, "loss_scale": 0.1, "assignment": "paper"},
    "printed": {"end": "final_div_factor", "loss_scale": 0.1},
    "printed with the temperature of the code": {"end": "final_div_factor", "loss_scale": 0.002},
    "floor": {"end": "floor", "loss_scale": "auto"},
    "log": {},
    "no controller": {},
    "tail": {"average_tail": 0.2},
}
HAS_NO_CONTROLLER = ("no controller", "tail")


def run_real(rank: int, optimizer_name: str, num_groups: int, rule: str) -> dict[str, Any]:
    warnings.simplefilter("ignore", hdet.HdetWarning)
    model = DistributedDataParallel(Net())
    optimizer = make_optimizer(optimizer_name, parameter_groups(model, num_groups))
    records = hdet.Records()
    common: dict[str, Any] = {"seed": SEED, "records": records}
    if rule == "log":
        scheduler = OneCycleLR(optimizer, MAX_LR[num_groups], **CYCLE)
        ensemble = hdet.Ensemble(
            optimizer,
            scheduler=scheduler,
            explore=[hdet.LearningRate(SPREAD)],
            sync_every=EVERY,
            controllers=[hdet.Controller(form="log", start=START)],
            **common,
        )
        step = ensemble.step
    else:
        auto = hdet.OneCycleAutoLR(
            optimizer,
            MAX_LR[num_groups],
            **CYCLE,
            ensemble_lr_spread_ratio=SPREAD,
            model_sync_interval=EVERY,
            auto_lr_warmup_steps=START,
            enable_auto_lr=rule not in HAS_NO_CONTROLLER,
            **RULES[rule],
            **common,
        )
        step = auto.step
    values = []
    for t in range(1, TOTAL + 1):
        values.append([group["lr"] for group in optimizer.param_groups])
        x, y = batch(rank, t)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step(loss)
    return {
        "values": values,
        "records": list(records),
        "parameters": [p.detach().clone() for p in model.parameters()],
    }


def run_reference(num_replicas: int, optimizer_name: str, num_groups: int, rule: str) -> reference.Trace:
    tensors = [p.detach().clone() for p in Net().parameters()]
    shapes = [t.shape for t in tensors]

    def unpack(theta: list[Tensor]) -> list[Tensor]:
        flat = torch.cat(theta)
        pieces = flat.split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def gradient(theta: list[Tensor], replica: int, step: int) -> tuple[float, list[Tensor]]:
        leaves = [t.clone().requires_grad_() for t in theta]
        x, y = batch(replica, step)
        loss = (predict(x, *unpack(leaves)) - y).square().mean()
        return loss.item(), list(torch.autograd.grad(loss, leaves))

    plan = planned(num_groups)
    if rule == "log":
        plan[TOTAL] = plan[TOTAL - 1]  # after the end the plan stays
    if rule in HAS_NO_CONTROLLER:
        plan[TOTAL] = [
            lr / 5 / 20 for lr in MAX_LR[num_groups]
        ]  # after its end OneCycleAutoLR stays at its floor
    flat = [t.reshape(-1) for t in tensors]
    controller = None
    if rule == "log":
        controller = hdet.Controller(form="log", start=START)
    elif rule not in HAS_NO_CONTROLLER:
        chosen = RULES[rule]
        controller = hdet.Controller(
            form="paper",
            start=START,
            temperature=chosen["loss_scale"],
            end=20 / 5 if chosen["end"] == "final_div_factor" else chosen["end"],
        )
    return reference.train(
        flat if num_groups == 4 else [torch.cat(flat)],
        gradient=gradient,
        optimizer=OPTIMIZERS[optimizer_name],
        schedule=lambda t: plan[t],
        num_replicas=num_replicas,
        spread=SPREAD,
        sync_every=EVERY,
        total_steps=TOTAL,
        names=["lr"] if num_groups == 1 else [f"lr.{g}" for g in range(4)],
        controller=controller,
        floors=[lr / 5 / 20 for lr in MAX_LR[num_groups]],
        seed=SEED,
        average_tail=RULES[rule].get("average_tail", 0.0),
        assignment=RULES[rule].get("assignment", "random"),
    )


def planned(num_groups: int) -> list[list[float]]:
    """The schedule, from torch's own OneCycleLR."""
    optimizer = make_optimizer("sgd", parameter_groups(Net(), num_groups))
    scheduler = OneCycleLR(optimizer, MAX_LR[num_groups], **CYCLE)
    plan = [[float(lr) for lr in scheduler.get_last_lr()]]
    for _ in range(TOTAL):
        optimizer.step()
        scheduler.step()
        plan.append([float(lr) for lr in scheduler.get_last_lr()])
    return plan


def run_all_optimizers(rank: int, num_groups: int, rule: str) -> dict[str, Any]:
    return {name: run_real(rank, name, num_groups, rule) for name in OPTIMIZERS}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_real_replicas_equal_the_reference(num_replicas: int, num_groups: int, rule: str) -> None:
    real = run_replicas(run_all_optimizers, num_replicas, num_groups, rule)
    for name in OPTIMIZERS:
        trace = run_reference(num_replicas, name, num_groups, rule)
        for rank in range(num_replicas):
            values = torch.tensor(real[rank][name]["values"], dtype=torch.float64)
            expected = torch.tensor([step.values[rank] for step in trace.steps], dtype=torch.float64)
            torch.testing.assert_close(values, expected, rtol=1e-9, atol=0)
            parameters = torch.cat([p.reshape(-1) for p in real[rank][name]["parameters"]])
            torch.testing.assert_close(parameters, torch.cat(trace.parameters[rank]), rtol=1e-8, atol=1e-10)
        records = real[0][name]["records"]
        assert len(records) == len(trace.rounds) == TOTAL // EVERY
        for record, expected_round in zip(records, trace.rounds, strict=True):
            assert record.step == expected_round.step
            assert record.losses == pytest.approx(expected_round.losses, rel=1e-9)
            assert list(record.base.values()) == pytest.approx(expected_round.bases, rel=1e-9)
            compared = record.section(ComparingRecord)
            if compared.weights:
                assert compared.weights == pytest.approx(expected_round.weights, rel=1e-6)
                assert list(compared.signal.values()) == pytest.approx(
                    expected_round.signals, rel=1e-6, abs=1e-12
                )
                assert list(compared.velocity.values()) == pytest.approx(
                    expected_round.velocities, rel=1e-6, abs=1e-12
                )


def test_the_controller_moves_the_base_in_these_runs() -> None:
    """Guards the test above: with a base that never moved it would prove little."""
    for rule in ("paper", "printed", "floor", "log"):
        trace = run_reference(4, "sgd", 1, rule)
        assert any(r.velocities[0] != 0 for r in trace.rounds)
        assert trace.rounds[-1].bases[0] != pytest.approx(planned(1)[TOTAL][0], rel=1e-3)

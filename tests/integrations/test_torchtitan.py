"""AutoLRContainer among torchtitan's own parts, on 2 x 2 ranks: the numbers of a plain loop."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import hdet
from hdet.integrations.torchtitan import AutoLRContainer

pytest.importorskip("torchtitan", reason="torchtitan is not installed; make test-integrations runs them")
from tests.integrations.launch import run_ranks, run_script
from tests.integrations.titan_runs import ACCUMULATED, MAX_NORM, STEPS, build, joined, loss_of

pytestmark = pytest.mark.timeout(300)


def test_a_run_has_the_numbers_of_a_plain_loop_and_resumes_bit_equal(tmp_path):
    ranks = run_ranks("tests/integrations/titan_runs.py", tmp_path, num_ranks=4)
    first = ranks[0]
    for rank in ranks[1:]:
        assert {**rank, "losses": first["losses"]} == first
    assert first["num_replicas"] == 2 and first["resumed_bit_equal"] == [True, True]

    model, records = build(), hdet.Records()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = [joined(step, range(1)) for step in range(STEPS)]
    found = hdet.find_lr(model, optimizer, batches, loss_of, total_steps=STEPS, clip_norm=MAX_NORM)
    assert first["found"] == pytest.approx(found.lr, rel=1e-9) and found.lr[0] > 1e-3
    auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, found=found, sync_every=7, records=records)
    rates = []
    for step in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        loss = loss_of(model, joined(step, range(ACCUMULATED)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        auto.step(loss)
    assert first["rates"] == pytest.approx(rates, rel=1e-9)
    for mine, theirs in zip(first["end"], model.parameters(), strict=True):
        assert mine == pytest.approx(theirs.detach().flatten().tolist(), rel=1e-6, abs=1e-9)
    # What the guard looks at is the mean over ranks and micro-batches.
    seen = {step: sum(losses) / len(losses) for step, losses in first["losses"][1:]}
    for record in list(records)[1:]:  # a save writes one of its own
        assert seen[record.step] == pytest.approx(record.losses[0], rel=1e-7)


class Container(list):
    """What an OptimizersContainer looks like."""

    def __init__(self, *optimizers, num_parts=1):
        super().__init__(optimizers)
        self.model_parts = [nn.Linear(2, 1) for _ in range(num_parts)]


def one_of(container):
    container.append(torch.optim.SGD(container.model_parts[0].parameters(), lr=1e-3))
    return container


def test_wrong_use_names_the_remedy():
    with pytest.raises(hdet.HdetError, match=r"one model part, got 2.*data or tensor parallelism"):
        AutoLRContainer(Container(num_parts=2), total_steps=STEPS)
    with pytest.raises(hdet.HdetError, match=r"one optimizer, got 0"):
        AutoLRContainer(Container(), total_steps=STEPS)
    container = AutoLRContainer(one_of(Container()), total_steps=STEPS)
    with pytest.raises(hdet.HdetError, match=re.escape("observe(loss) must be called")):
        container.step()
    container.observe(torch.ones(()))
    with pytest.raises(hdet.HdetError, match="find_lr must be called before the first step"):
        container.find_lr([], loss_of)


def test_the_example(tmp_path):
    shown = run_script("examples/torchtitan_loop.py", num_ranks=4, cwd=tmp_path)
    assert "2 replicas" in shown and (tmp_path / "runs/torchtitan/.metadata").exists()
    assert float(re.findall(r"last loss: (\S+)", shown)[0]) < 1.0

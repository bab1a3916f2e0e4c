"""find_lr and AutoLR on what an Accelerator has prepared: the numbers of a plain loop."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hdet
from tests.helpers.needed import needed

pytest.importorskip("accelerate", reason="accelerate is not installed; make test-integrations runs them")
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration

from hdet.integrations.accelerate import undisturbed

ROOT = Path(__file__).parents[2]
STEPS = 60


@pytest.fixture(autouse=True)
def own_state():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def loss_of(model, x):
    return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()


def parts(batch_size=16, shuffle=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    data = torch.randn(STEPS * 16, 8, generator=torch.Generator().manual_seed(1))
    return (
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        DataLoader(data, batch_size, shuffle=shuffle),
    )


def prepared(num_accumulated=1, shuffle=False, **settings):
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=num_accumulated,
        dataloader_config=DataLoaderConfiguration(**settings),
    )
    return accelerator, *accelerator.prepare(*parts(16 // num_accumulated, shuffle))


def train(accelerator, model, optimizer, loader, auto, num_batches=None):
    for i, batch in enumerate(loader):
        if i == num_batches:
            break
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            auto.observe(loss)
            if accelerator.sync_gradients:
                auto.step()


def test_what_is_found_and_trained_is_that_of_a_plain_loop():
    accelerator, model, optimizer, loader = prepared()
    with undisturbed(loader):
        found = hdet.find_lr(model, optimizer, loader, loss_of, total_steps=STEPS)
    auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, found=found)
    train(accelerator, model, optimizer, loader, auto)

    plain, plain_optimizer, batches = parts()
    again = hdet.find_lr(plain, plain_optimizer, batches, loss_of, total_steps=STEPS)
    assert found == again and found.lr[0] > 1e-3
    plain_auto = hdet.AutoLR(plain_optimizer, total_steps=STEPS, model=plain, found=again)
    for batch in batches:
        plain_optimizer.zero_grad()
        loss = loss_of(plain, batch)
        loss.backward()
        plain_optimizer.step()
        plain_auto.step(loss)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("is_seedable", [False, True])
def test_the_loader_and_random_numbers_are_as_without_the_search(is_seedable):
    seen = []
    for searches in (False, True):
        accelerator, model, optimizer, loader = prepared(shuffle=True, use_seedable_sampler=is_seedable)
        random.seed(5)
        if searches:
            with undisturbed(loader):
                hdet.find_lr(model, optimizer, loader, loss_of, total_steps=1000)  # more than an epoch
        assert not accelerator.gradient_state.in_dataloader
        seen.append((torch.stack([*loader, *loader]), random.random(), torch.rand(1)))
    assert torch.equal(seen[0][0], seen[1][0]) and seen[0][1:] == seen[1][1:]


def test_accumulation_counts_optimizer_steps():
    accelerator, model, optimizer, loader = prepared(num_accumulated=2)
    auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model)
    rates = []
    optimizer.optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
    train(accelerator, model, optimizer, loader, auto)
    assert auto.num_steps == len(rates) == STEPS
    _, plain_optimizer, _ = parts()
    plain = hdet.AutoLR(plain_optimizer, total_steps=STEPS)
    expected = []
    for _ in range(STEPS):
        expected.append(plain_optimizer.param_groups[0]["lr"])
        plain_optimizer.step()
        plain.step(1.0)
    assert rates == expected


def test_a_checkpoint_of_the_accelerator_resumes_bit_equal(tmp_path):
    accelerator, model, optimizer, loader = prepared()
    with undisturbed(loader):
        found = hdet.find_lr(model, optimizer, loader, loss_of, total_steps=STEPS)
    auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, found=found)
    accelerator.register_for_checkpointing(auto)
    train(accelerator, model, optimizer, loader, auto, num_batches=30)
    loader.end()
    auto.converge()
    accelerator.save_state(str(tmp_path))
    loader.set_epoch(0)
    train(accelerator, model, optimizer, accelerator.skip_first_batches(loader, 30), auto)
    end = [p.detach().clone() for p in model.parameters()]

    own = AcceleratorState._reset_state(True), GradientState._reset_state()
    assert own == (None, None)
    accelerator, model, optimizer, loader = prepared()
    again = hdet.AutoLR(optimizer, total_steps=STEPS, model=model)
    accelerator.register_for_checkpointing(again)
    accelerator.load_state(str(tmp_path))
    assert again.num_steps == 30
    loader.set_epoch(0)
    train(accelerator, model, optimizer, accelerator.skip_first_batches(loader, 30), again)
    assert again.found_lr == auto.found_lr
    assert all(torch.equal(a, b) for a, b in zip(end, model.parameters(), strict=True))


def test_prepare_leaves_it_alone_and_calls_without_a_step_do_nothing():
    accelerator, model, optimizer, loader = prepared()
    auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model)
    assert accelerator.prepare(auto) is auto
    for _, batch in zip(range(3), loader, strict=False):
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        for _ in range(8):  # as a prepared scheduler does with eight processes
            auto.step(loss)
        optimizer.zero_grad()
    assert auto.num_steps == 3


def run_example(name, tmp_path, *launcher):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / name)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_example_on_two_ranks(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    shown = run_example("accelerate_loop.py", tmp_path, *launcher)
    assert "2 replicas" in shown
    assert float(re.findall(r"last loss: (\S+)", shown)[0]) < 0.1


def test_the_example_of_the_trainer(tmp_path):
    needed("transformers")
    shown = run_example("transformers_trainer.py", tmp_path)
    assert "found: learning rate" in shown
    assert float(re.findall(r"held-out loss: (\S+)", shown)[0]) < 2.8

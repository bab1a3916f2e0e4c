"""LearningRateSearch in a Trainer: the numbers of a plain loop, and nothing else notices it."""

from __future__ import annotations

import json
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import hdet
import hdet.integrations.lightning as integration
from hdet.integrations.lightning import LearningRateSearch

pytest.importorskip("lightning", reason="lightning is not installed; make test-integrations runs them")
import lightning
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision

from tests.integrations.launch import run_ranks
from tests.integrations.lightning_modules import (
    BATCH_SIZE,
    NUM_BATCHES,
    Net,
    data,
    held_out,
    loader,
    plain_loop,
)

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Lightning warns of workers, of torch's own deprecations and more
    pytest.mark.filterwarnings("error::hdet.HdetWarning"),
]


def trainer_of(*callbacks: Callback, num_epochs: int = 4, **arguments) -> lightning.Trainer:
    settings = {
        "max_epochs": num_epochs,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(**(settings | arguments), callbacks=list(callbacks))


def assert_same(module: nn.Module, other: nn.Module) -> None:
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize(
    ("num_epochs", "num_micro_batches", "clip_norm"),
    [(6, 1, None), (12, 3, 0.5)],
    ids=["plain", "accumulated and clipped"],
)
def test_a_run_has_the_numbers_of_a_plain_loop(num_epochs, num_micro_batches, clip_norm, monkeypatch):
    # Trials of a LightningModule are made one after the other. Those of the plain model in one pass would
    # differ by rounding.
    monkeypatch.setattr("hdet.search.trial_rows._MOST_ELEMENTS", 0)
    module, search = Net(), LearningRateSearch()
    trainer = trainer_of(
        search,
        num_epochs=num_epochs,
        accumulate_grad_batches=num_micro_batches,
        gradient_clip_val=clip_norm,
    )
    trainer.fit(module, loader())
    found, model = plain_loop(num_epochs, num_micro_batches=num_micro_batches, clip_norm=clip_norm)
    assert search.found == found
    assert found.lr[0] > 2e-4 or num_micro_batches > 1  # trials of so few steps may tell nothing
    assert_same(module.net, model)
    assert search.auto is not None and search.auto.num_steps == trainer.global_step
    assert trainer.logged_metrics["lr"] == pytest.approx(0.15 * found.lr[0], rel=0.1)


class Watcher(Callback):
    """Notes what reaches callbacks before the first batch, and how often."""

    def __init__(self) -> None:
        self.num_backward, self.val_losses, self.early = 0, [], []

    def on_before_backward(self, *_) -> None:
        self.num_backward += 1

    def on_train_batch_start(self, trainer, *_) -> None:
        if trainer.global_step == 0:
            self.early.append(dict(trainer.callback_metrics))

    def on_validation_end(self, trainer, *_) -> None:
        if not trainer.sanity_checking:
            self.val_losses.append(trainer.callback_metrics["val_loss"].item())


def test_nothing_sees_a_trial(tmp_path):
    def fit(*callbacks):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(7)
        module, watcher = Net(dropout=0.1), Watcher()
        best = ModelCheckpoint(tmp_path / f"best{len(callbacks)}", monitor="val_loss", mode="min")
        stopping = EarlyStopping("loss", patience=1, min_delta=-100)
        trainer = trainer_of(
            *callbacks, watcher, best, stopping, logger=CSVLogger(tmp_path, f"log{len(callbacks)}")
        )
        generator = torch.Generator().manual_seed(3)
        trainer.fit(module, loader(shuffle=True, generator=generator), held_out())
        metrics = (Path(trainer.logger.log_dir) / "metrics.csv").read_text().splitlines()
        return module, watcher, best, trainer, metrics, generator.get_state()

    plain, plain_watcher, *_, plain_trainer, plain_metrics, plain_state = fit()
    module, watcher, best, trainer, metrics, state = fit(LearningRateSearch())
    assert module.seen == plain.seen  # the same data and the same random numbers
    assert torch.equal(state, plain_state)
    assert watcher.early == plain_watcher.early == [{}]
    assert watcher.num_backward == plain_watcher.num_backward == trainer.global_step == 4 * NUM_BATCHES
    assert len(metrics) == len(plain_metrics)
    assert best.best_model_score.item() == min(watcher.val_losses) and len(watcher.val_losses) == 4
    assert trainer.current_epoch == plain_trainer.current_epoch == 4  # not stopped early
    assert trainer.callback_metrics["mean_loss"] == pytest.approx(
        trainer.callback_metrics["loss_epoch"].item()
    )


@pytest.mark.parametrize("epoch", [9, 28], ids=["within a round", "within the tail"])
def test_a_resumed_run_is_bit_exact(tmp_path, monkeypatch, epoch):
    short = {"num_epochs": 30, "limit_train_batches": 5}  # 150 steps; the tail begins at 139
    undisturbed = Net()
    trainer_of(LearningRateSearch(sync_every=7), **short).fit(undisturbed, loader())
    first, search = Net(), LearningRateSearch(sync_every=7)
    saved = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trainer_of(search, saved, **short).fit(first, loader())
    assert_same(first, undisturbed)

    monkeypatch.setattr(integration, "searched", Mock(side_effect=AssertionError("searched again")))
    again, resumed = Net(), LearningRateSearch(sync_every=7)
    trainer = trainer_of(resumed, **short)
    trainer.fit(again, loader(), ckpt_path=tmp_path / f"epoch={epoch}.ckpt", weights_only=True)
    assert_same(again, first)
    assert resumed.found == search.found
    assert resumed.auto is not None and resumed.auto.found_lr == search.auto.found_lr


def test_the_last_validation_and_checkpoint_have_the_mean_of_the_tail(tmp_path):
    module, search, watcher = Net(), LearningRateSearch(), Watcher()
    trainer = trainer_of(search, watcher, ModelCheckpoint(tmp_path, filename="last"))
    trainer.fit(module, loader(), held_out())
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert all(torch.equal(state["state_dict"][name], p) for name, p in module.state_dict().items())
    x, y = held_out().dataset.tensors
    module.eval()
    assert watcher.val_losses[-1] == pytest.approx(mse_loss(module.net(x), y).item())
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert (tmp_path / "after.ckpt").exists()


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
def test_steps_that_a_gradient_scaler_skips_do_not_count(is_fused):
    class Fused(Net):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.net.parameters(), lr=self.lr, fused=is_fused)

    module, search = Fused(), LearningRateSearch()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)  # the first steps overflow
    trainer = trainer_of(search, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
    trainer.fit(module, loader())
    (num_taken,) = {int(state["step"]) for state in search.auto.optimizer.state.values()}
    assert search.auto.num_steps == num_taken < trainer.global_step == 4 * NUM_BATCHES
    assert search.auto.tail._mean is None  # it is in place


def test_trials_have_the_precision_of_the_run():
    seen = set()

    class Precise(Net):
        def training_step(self, batch, batch_idx):
            seen.add((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            return super().training_step(batch, batch_idx)

    trainer_of(LearningRateSearch(), num_epochs=2, precision="bf16-mixed").fit(Precise(), loader())
    assert seen == {(True, torch.bfloat16)}


def test_several_optimizers_as_one():
    class Joint(Net):
        def configure_optimizers(self):
            first, _, _, last = self.net
            return hdet.JointOptimizer(
                torch.optim.SGD(first.parameters(), lr=1e-4), torch.optim.AdamW(last.parameters(), lr=1e-4)
            )

    search = LearningRateSearch()
    trainer_of(search, num_epochs=2).fit(Joint(), loader())
    assert search.auto is not None and search.auto.num_steps == 2 * NUM_BATCHES


class WithScheduler(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class WithTwo(Net):  # Lightning itself refuses them in automatic optimization
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return super().configure_optimizers(), super().configure_optimizers()


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "arguments", "batches", "message"),
    [
        (WithScheduler, {}, loader, "only the optimizer, got a StepLR too: leave it out"),
        (WithTwo, {}, loader, "got 2: hdet.JointOptimizer"),
        (Manual, {}, loader, "automatic_optimization must be True"),
        (Net, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, loader, "must be 'norm'"),
        (
            Net,
            {"max_steps": 60},
            lambda: iter([tuple(b) for b in loader()] * 9),
            "must be able to start over",
        ),
        (Net, {"num_epochs": -1}, loader, r"pass Trainer\(max_steps=...\)"),
        (Net, {"num_epochs": 1}, loader, "a shorter run cannot afford a search"),
    ],
    ids=["scheduler", "two optimizers", "manual", "clip by value", "iterator", "endless", "short"],
)
def test_wrong_use_names_the_remedy(module, arguments, batches, message):
    with pytest.raises((hdet.HdetError, ValueError), match=message):
        trainer_of(LearningRateSearch(), **arguments).fit(module(), batches())


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    trainer = trainer_of(num_epochs=1, limit_train_batches=2)
    trainer.fit(Net(), loader())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(hdet.HdetError, match="load only the weights"):
        trainer_of(LearningRateSearch()).fit(Net(), loader(), ckpt_path=tmp_path / "plain.ckpt")


def test_fast_dev_run_does_not_search():
    search = LearningRateSearch()
    trainer_of(search, fast_dev_run=True).fit(Net(), loader())
    assert search.found is None


def test_a_missing_framework_names_the_command(monkeypatch):
    monkeypatch.setattr(integration, "_Callback", object)
    with pytest.raises(hdet.HdetError, match=r"pip install .*\[lightning\]'"):
        LearningRateSearch()


def test_workers_that_stay_and_a_sampler_keep_their_place():
    def sums(*callbacks):
        torch.manual_seed(1)
        module = Net()
        weights = torch.ones(len(data()))
        sampler = torch.utils.data.WeightedRandomSampler(
            weights, 64, generator=torch.Generator().manual_seed(2)
        )
        batches = DataLoader(data(), BATCH_SIZE, sampler=sampler, num_workers=1, persistent_workers=True)
        trainer_of(*callbacks, num_epochs=15).fit(module, batches)
        return [seen[1] for seen in module.seen]

    assert sums(LearningRateSearch()) == sums()


def test_two_ranks_find_the_same_and_resume(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(ROOT / "tests/integrations/two_ranks.py")
    done = subprocess.run(
        [sys.executable, *command, script, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    first, again = ranks[0]
    assert first == again and first["found"][0] > 2e-4
    assert first["num_steps"] == 6 * NUM_BATCHES / 2


def test_two_ranks_differ_within_a_round_and_converge(tmp_path):
    ranks = run_ranks("tests/integrations/two_ranks.py", tmp_path, "--apart")
    (mine, mine_again), (theirs, theirs_again) = ranks
    assert mine["end"] == theirs["end"] == mine_again["end"] == theirs_again["end"]
    ratios = [one / other for one, other in zip(mine["rates"], theirs["rates"], strict=True)]
    assert [max(ratio, 1 / ratio) for ratio in ratios] == pytest.approx([1.25 / 0.75] * 60)
    assert len({ratio > 1 for ratio in ratios}) == 2  # they change places
    assert mine["found_lr"] == theirs["found_lr"] == mine_again["found_lr"] != 0.01  # the controller

    pairs = [torch.tensor(pair) for pair in zip(mine["weights"], theirs["weights"], strict=True)]
    apart = {step for step, (a, b) in enumerate(pairs, start=1) if not torch.equal(a, b)}
    assert apart == {step for step in range(1, 61) if step % 8 and step != 60}
    assert mine["validated"] == theirs["validated"]
    assert {5, 10, 20} < {step for step, _ in mine["validated"]} and mine["validated"][0][0] == 0
    for name, step in [("15", 15), ("45", 45), ("weights13", 13)]:
        saved = torch.load(tmp_path / f"first/{name}.ckpt", weights_only=True)["state_dict"]
        weights = torch.cat([saved[name].flatten() for name, _ in Net().named_parameters()])
        assert torch.allclose(weights, pairs[step - 1].mean(0), atol=1e-7), name
        assert not torch.equal(weights, pairs[step - 1][0])

    rounds = {step: row for step, *row in mine["rounds"] if row[0]}
    assert list(rounds) == [8, 16, 24, 32, 40, 48, 56, 60]
    for step, (_, multipliers, has_converged, signal) in rounds.items():
        assert sorted(multipliers) == [0.75, 1.25] and has_converged
        assert ("lr" in signal) == (step != 60)  # of the last round, which is too short


def test_a_run_without_a_search_has_the_learning_rate_of_the_optimizer(monkeypatch):
    monkeypatch.setattr(integration, "searched", Mock(side_effect=AssertionError("searched")))
    module, search = Net(lr=0.01), LearningRateSearch(search=False)
    trainer_of(search, num_epochs=1, gradient_clip_val=9.0, gradient_clip_algorithm="value").fit(
        module, loader()
    )
    assert search.found is None and search.auto.found_lr == {"lr": 0.01}

    model = Net().net
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    auto = hdet.AutoLR(optimizer, total_steps=NUM_BATCHES, model=model)
    for x, y in loader():
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)
    assert_same(module.net, model)


def test_a_wrong_spread_is_refused_before_a_search():
    with pytest.raises(ValueError, match="spread must be a number in"):
        LearningRateSearch(spread=1.2)


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples/lightning_module.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.count("your guess was") == 1
    assert float(shown.split()[-1]) > 0.95, shown

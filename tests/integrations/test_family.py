"""Every framework of docs/integrations.md runs its card on one task, with the numbers of a plain loop."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import hdet
from tests.helpers.needed import needed
from tests.integrations.cards import (
    BATCH,
    EPOCHS,
    PAGE,
    TOTAL_STEPS,
    data,
    loader,
    loss_of,
    net,
    plain_loop,
    snippet,
    task,
    weights,
)
from tests.integrations.launch import run_ranks, run_script

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # frameworks warn of much
    pytest.mark.filterwarnings("error::hdet.HdetWarning"),
    pytest.mark.timeout(300),
]

PACKAGES = [
    "lightning",
    "transformers",
    "peft",
    "accelerate",
    "torchtitan",
    "deepspeed",
    "ray",
    "pytorch-ignite",
    "skorch",
    "fastai",
    "keras",
    "timm",
]

Result = tuple[hdet.FoundLR, list[torch.Tensor]]


@contextmanager
def searches() -> Iterator[list[hdet.FoundLR]]:
    """Collect what searches within the block find."""
    found: list[hdet.FoundLR] = []
    find_lr = hdet.find_lr

    def remembering(*told, **more):
        found.append(find_lr(*told, **more))
        return found[-1]

    with patch.object(hdet, "find_lr", remembering):
        yield found


@functools.cache
def expected() -> Result:
    names = task()
    return plain_loop(names), weights(names["model"])


def of(names: dict[str, Any]) -> Result:
    return names["found"], weights(names["model"])


# --- the frameworks: each runs its card ------------------------------------------------------------------


def lightning(tmp_path) -> Result:
    lightning = needed("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, _):
            return loss_of(self.net, batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.0)

    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
    names = {**task(), "module": Module(), "Trainer": functools.partial(lightning.Trainer, **quiet)}
    exec(snippet("lightning").replace("max_epochs=10", f"max_epochs={EPOCHS}"), names)
    return names["search"].found, weights(names["module"])


def fabric(tmp_path) -> Result:
    fabric = needed("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    names = task()
    names |= {"fabric": fabric, "net": names["model"]}
    exec(snippet("fabric"), names)
    return names["found"], weights(names["net"])


class WithLoss(nn.Module):
    """As models of transformers are: they return their loss."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, y):
        return {"loss": loss_of(self.net, (x, y))}


def transformers(tmp_path) -> Result:
    transformers = needed("transformers")
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=TOTAL_STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-4,
        optim="adamw_torch",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    rows = [{"x": x, "y": y} for x, y in data()]
    names = {**task(), "model": WithLoss(), "args": args, "data": rows}
    exec(snippet("transformers"), names)
    return names["callback"].found, weights(names["model"])


def accelerate(tmp_path) -> Result:
    accelerate = needed("accelerate")
    names = {**task(), "accelerator": accelerate.Accelerator(cpu=True)}
    try:
        exec(snippet("accelerate"), names)
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
    return of(names)


def torchtitan(tmp_path) -> Result:
    parts = needed("torchtitan.components.optimizer")
    names = task()
    adamw = {"lr": 1e-4, "weight_decay": 0.0, "fused": False}
    group = parts.ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=adamw)
    config = parts.OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
    names["optimizers"] = parts.OptimizersContainer(config, model_parts=[names["model"]])
    exec(snippet("torchtitan"), names)
    return names["lr_schedulers"].found, weights(names["model"])


def ignite(tmp_path) -> Result:
    engine = needed("ignite.engine")
    names = {**task(), "Events": engine.Events, "loss_fn": mse_loss}
    names["create_supervised_trainer"] = engine.create_supervised_trainer
    exec(snippet("ignite"), names)
    return of(names)


def skorch(tmp_path) -> Result:
    skorch = needed("skorch")
    needed("skorch.callbacks")
    names = {**task(), "skorch": skorch}
    exec(snippet("skorch"), names)
    search = names["LearningRateSearch"]()
    regressor = skorch.NeuralNetRegressor(
        names["model"],
        optimizer=torch.optim.AdamW,
        optimizer__weight_decay=0.0,
        lr=1e-4,
        batch_size=BATCH,
        max_epochs=EPOCHS,
        train_split=None,
        callbacks=[search],
        verbose=0,
    )
    x, y = data().tensors
    with searches() as found:
        regressor.fit(x, y)
    return found[0], weights(regressor.module_)


def fastai(tmp_path) -> Result:
    basics = needed("fastai.basics")
    needed("fastai.callback.all")
    names = {**task(), "Callback": basics.Callback}
    exec(snippet("fastai"), names)
    batches = basics.DataLoaders(basics.DataLoader(data(), bs=BATCH), basics.DataLoader(data(), bs=BATCH))
    learn = basics.Learner(
        batches,
        names["model"],
        loss_func=mse_loss,
        opt_func=functools.partial(basics.OptimWrapper, opt=torch.optim.AdamW),
        wd=0.0,
        path=tmp_path,
    )
    search = names["LearningRateSearch"]()
    with learn.no_bar(), learn.no_logging(), searches() as found:
        learn.fit(EPOCHS, 1e-4, cbs=search)
    return found[0], weights(learn.model)


FAMILY: list[Callable[..., Result]] = [
    lightning,
    fabric,
    transformers,
    accelerate,
    torchtitan,
    ignite,
    skorch,
    fastai,
]


@pytest.mark.parametrize("run", FAMILY, ids=lambda run: run.__name__)
def test_every_framework_has_the_numbers_of_a_plain_loop(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, end = run(tmp_path)
    plain, plain_end = expected()
    assert set(found.lr) == set(plain.lr)  # the Trainer makes two groups
    assert found.trials == plain.trials and found.lr[0] > 1e-3
    for mine, theirs in zip(end, plain_end, strict=True):
        assert torch.equal(mine, theirs)


# --- those that need processes of their own --------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "package"), [("fabric", "lightning"), ("accelerate", "accelerate"), ("deepspeed", "deepspeed")]
)
def test_two_ranks_have_the_numbers_of_a_plain_loop(kind, package, tmp_path):
    needed(package)
    first, second = run_ranks("tests/integrations/family_ranks.py", tmp_path, kind)
    assert first == second
    ours = first[kind]
    assert ours["num_replicas"] == 2 and ours["resumes"]
    assert ours["found"] == ours["plain_found"] and ours["found"][0] > 1e-3
    assert ours["end"] == ours["plain_end"]


def test_keras_trains_with_what_was_found(monkeypatch):
    if not find_spec("keras"):  # importing it here would choose a backend
        pytest.skip("keras is not installed; make test-integrations runs them")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert "learning rate" in run_script("tests/integrations/keras_run.py")


def test_timm_trains_with_what_was_found(monkeypatch):
    apart = Path(sys.prefix) / "timm"  # where make puts it: its torchvision does not load beside transformers
    if not apart.exists() and not find_spec("timm"):
        pytest.skip("timm is not installed; make test-integrations runs them")
    monkeypatch.setenv("PYTHONPATH", str(apart))
    assert "learning rate" in run_script("tests/integrations/timm_run.py")


def test_ignite_accumulates_saves_and_loads(tmp_path):
    engines, handlers = needed("ignite.engine"), needed("ignite.handlers")
    ends, path = [], tmp_path / "checkpoint.pt"
    for is_second in (False, True):
        names = task()
        found = None if is_second else expected()[0]
        model, optimizer = names["model"], names["optimizer"]
        auto = hdet.AutoLR(optimizer, total_steps=TOTAL_STEPS, model=model, found=found, sync_every=7)
        trainer = engines.create_supervised_trainer(model, optimizer, mse_loss, gradient_accumulation_steps=2)
        everything = {"model": model, "optimizer": optimizer, "auto": auto, "trainer": trainer}
        done = engines.Events.ITERATION_COMPLETED
        trainer.add_event_handler(done, lambda engine, auto=auto: auto.observe(engine.state.output))
        trainer.add_event_handler(done(every=2), lambda engine, auto=auto: auto.step())
        if is_second:
            handlers.Checkpoint.load_objects(everything, torch.load(path, weights_only=True))
        else:
            saver = handlers.Checkpoint(everything, handlers.DiskSaver(tmp_path), filename_pattern=path.name)
            trainer.add_event_handler(engines.Events.EPOCH_COMPLETED(once=1), saver)
        trainer.run(loader(BATCH // 2), max_epochs=EPOCHS)
        assert auto.num_steps == TOTAL_STEPS
        ends.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


# --- wrong use ---------------------------------------------------------------------------------------------


def test_optimizers_that_are_not_those_of_torch_are_refused():
    basics = needed("fastai.basics")
    model = net()
    theirs = basics.Adam(model.parameters(), lr=1e-4)
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got"):
        hdet.find_lr(model, theirs, loader(), loss_of, total_steps=TOTAL_STEPS)


def test_torchft_is_refused_with_the_reason():
    torchft = needed("torchft")
    model = net()
    theirs = torchft.Optimizer(Mock(), torch.optim.AdamW(model.parameters(), lr=1e-4))
    with pytest.raises(TypeError, match="torchft's, got a OptimizerWrapper: each of its replica groups"):
        hdet.AutoLR(theirs, total_steps=TOTAL_STEPS, model=model)


def test_the_page_names_what_is_installed():
    told = PAGE.read_text().split("\nTested on ")[1].split("\n\n")[0]
    told = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", told).lower()
    named = dict(re.findall(r"(\S+)\s+(\d+(?:\.\d+)+)", told))
    shown_as = {"lightning": "fabric", "ray": "train", "pytorch-ignite": "ignite"}
    apart = Path(sys.prefix) / "timm"
    for package in ["torch", *PACKAGES]:
        try:
            here = version(package)
        except PackageNotFoundError:
            found = list(apart.glob(f"{package}-*.dist-info"))
            if not found:
                continue
            here = found[0].name.removeprefix(f"{package}-").removesuffix(".dist-info")
        assert named[shown_as.get(package, package)] == here.split("+")[0], package
    assert named.keys() == {"torch", *(shown_as.get(package, package) for package in PACKAGES)}

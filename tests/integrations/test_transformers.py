"""HdetCallback in a stock Trainer: the numbers of a plain loop, checkpoints, ranks, and what is refused."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import hdet
from tests.helpers.models import all_equal
from tests.helpers.needed import needed

pytest.importorskip("transformers", reason="transformers is not installed; make test-integrations runs them")
from transformers import EarlyStoppingCallback, TrainerCallback, default_data_collator

from hdet.integrations.transformers import HdetCallback
from hdet.method.recipe import Recipe
from tests.integrations.launch import run_ranks
from tests.integrations.trainer_runs import (
    BATCH,
    STEPS,
    some_of,
    tiny_data,
    tiny_model,
    tiny_trainer,
    weights_of,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
ROOT = Path(__file__).parents[2]


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def own_loss(model, batch):
    return model(**batch).loss


class Spy(TrainerCallback):
    """What the first step starts from, and the batches that it and all others train on."""

    def __init__(self):
        self.batches, self.random, self.evaluations, self.rates = [], None, 0, []

    def on_train_begin(self, args, state, control, *, model, **_):
        model.register_forward_pre_hook(self.seen, with_kwargs=True)
        self.batches.clear()

    def on_step_begin(self, args, state, control, *, optimizer, **_):
        if self.random is None:
            self.random = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        self.rates.append(optimizer.param_groups[0]["lr"])

    def seen(self, model, _, inputs):
        if model.training:
            self.batches.append(inputs["input_ids"].clone())

    def on_evaluate(self, args, state, control, **_):
        self.evaluations += 1


def test_a_trainer_finds_and_does_what_a_plain_loop_does(tmp_path):
    callback, spy = HdetCallback(), Spy()
    trainer = tiny_trainer(tmp_path, callback, spy, train_sampling_strategy="sequential")
    trainer.train()

    model, loader = tiny_model(), DataLoader(tiny_data(), BATCH, collate_fn=default_data_collator)
    optimizer = tiny_trainer(tmp_path, model=model).create_optimizer()
    found = hdet.find_lr(model, optimizer, loader, own_loss, total_steps=STEPS, clip_norm=1.0)
    assert callback.found == found and found.asked[0] == 1e-4 and found.lr[0] > 2e-4
    auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, found=found)
    losses, rates = [], []
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch, num_items_in_batch=torch.tensor(batch["labels"].numel())).loss  # as the Trainer
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        auto.step(loss)
        losses.append(loss.item())

    assert equal(weights_of(trainer.model), weights_of(model))
    logs = [row for row in trainer.state.log_history if "learning_rate" in row]
    assert [row["learning_rate"] for row in logs] == rates == spy.rates
    assert [row["loss"] for row in logs] == pytest.approx(losses, abs=1e-4)
    assert callback.auto.num_steps == STEPS and callback.auto.found_lr == auto.found_lr


def test_the_search_leaves_no_trace_in_random_numbers_and_batches(tmp_path):
    seen, left = [], []
    for callbacks in ([], [HdetCallback()]):
        random.seed(3)
        spy = Spy()
        trainer = tiny_trainer(
            tmp_path,
            *callbacks,
            spy,
            model=tiny_model(dropout=0.1),
            data=tiny_data(80),
            dataloader_num_workers=0,
        )
        references = trainer.accelerator.gradient_state.dataloader_references
        trainer.train()
        seen.append(spy)
        left.append(len(trainer.accelerator.gradient_state.dataloader_references) - len(references))
    plain, ours = seen
    assert left[0] == left[1]  # a loader that the accelerator believes to be read
    assert torch.equal(plain.random[0], ours.random[0]) and plain.random[1:] == ours.random[1:]
    # The spy sees the batches of the search too, and those of the run are the last.
    assert equal(plain.batches, ours.batches[-STEPS:])


def test_a_resumed_training_is_bit_equal_and_does_not_search(tmp_path, monkeypatch):
    settings = {"save_strategy": "steps", "save_steps": 20, "model": tiny_model(dropout=0.1)}
    callback = HdetCallback()
    whole = tiny_trainer(tmp_path, callback, **settings)
    whole.train()
    monkeypatch.setattr("hdet.integrations.transformers.searched", None)
    for step in (20, 40, 60):
        again = HdetCallback()
        resumed = tiny_trainer(tmp_path, again, **{**settings, "model": tiny_model(dropout=0.1)})
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert equal(weights_of(whole.model), weights_of(resumed.model)), step
        assert again.found == callback.found
        state, same = again.auto.state_dict(), callback.auto.state_dict()
        assert all_equal(state["controllers"], same["controllers"]) and state["num_steps"] == STEPS


def test_a_checkpoint_within_the_tail_resumes_bit_equal(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 58}
    whole = tiny_trainer(tmp_path, HdetCallback(), **settings)
    whole.train()
    resumed = tiny_trainer(tmp_path, HdetCallback(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-58"))
    assert equal(weights_of(whole.model), weights_of(resumed.model))


def test_the_mean_of_the_tail_is_saved_and_evaluated(tmp_path):
    taken = []

    class Late(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, *, model, optimizer, **_):
            if not taken:
                inner = optimizer.optimizer
                inner.register_step_post_hook(lambda *_: taken.append(weights_of(model)))

    trainer = tiny_trainer(
        tmp_path,
        HdetCallback(),
        Late(),
        evaluates=True,
        eval_strategy="steps",
        eval_steps=STEPS,
        save_strategy="steps",
        save_steps=STEPS,
    )
    trainer.train()
    num = 4  # 7.5 % of 60
    mean = [torch.stack(ws).mean(0) for ws in zip(*taken[-num:], strict=True)]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mean, weights_of(trainer.model), strict=True))
    assert not equal(taken[-1], weights_of(trainer.model))
    saved = type(trainer.model).from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    assert equal(weights_of(saved), weights_of(trainer.model))
    during = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row][-1]
    assert trainer.evaluate()["eval_loss"] == during


def test_accumulation_counts_optimizer_steps_and_searches_with_whole_steps(tmp_path):
    callback = HdetCallback()
    trainer = tiny_trainer(
        tmp_path,
        callback,
        per_device_train_batch_size=BATCH // 2,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
    )
    trainer.train()
    plain = HdetCallback()
    other = tiny_trainer(tmp_path, plain, train_sampling_strategy="sequential")
    other.train()
    assert callback.auto.num_steps == trainer.state.global_step == STEPS
    assert callback.found.num_steps == plain.found.num_steps
    # The ramp trains on the same batches; trials take other parts of them.
    assert [loss for _, loss in callback.found.ramp] == pytest.approx(
        [loss for _, loss in plain.found.ramp], abs=1e-3
    )
    assert abs(math.log(callback.found.lr[0] / plain.found.lr[0])) < math.log(4)  # by such parts it is noisy


def test_the_guard_sees_the_mean_loss_with_accumulation(tmp_path):
    records = hdet.Records()
    callback = HdetCallback(records=records)
    trainer = tiny_trainer(
        tmp_path, callback, per_device_train_batch_size=BATCH // 2, gradient_accumulation_steps=2
    )
    trainer.train()
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert records[0].search is not None
    first = records[1]
    assert first.losses[0] == pytest.approx(np.mean(logged[: first.step]), rel=1e-3)


def test_early_stopping_and_the_best_checkpoint_see_no_trial(tmp_path):
    spy = Spy()
    trainer = tiny_trainer(
        tmp_path,
        HdetCallback(),
        spy,
        EarlyStoppingCallback(1, early_stopping_threshold=100.0),
        evaluates=True,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="steps",
        save_steps=10,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
    )
    trainer.train()
    assert trainer.state.global_step == 20 and spy.evaluations == 2
    assert trainer.state.best_global_step == 20
    best = type(trainer.model).from_pretrained(trainer.state.best_model_checkpoint)
    assert equal(weights_of(best), weights_of(trainer.model))


def test_an_early_stop_within_the_tail_ends_with_its_mean(tmp_path):
    class Stop(TrainerCallback):
        last = None

        def on_step_end(self, args, state, control, *, model, **_):
            if state.global_step == STEPS - 1:
                self.last = weights_of(model)
                control.should_training_stop = True

    stop = Stop()
    trainer = tiny_trainer(tmp_path, HdetCallback(), stop)
    trainer.train()
    assert trainer.state.global_step == STEPS - 1
    assert not equal(stop.last, weights_of(trainer.model))
    assert all(
        torch.allclose(a, b, atol=0.05) for a, b in zip(stop.last, weights_of(trainer.model), strict=True)
    )


def test_a_second_training_searches_again_and_leaves_no_hooks(tmp_path):
    callback = HdetCallback()
    trainer = tiny_trainer(tmp_path, callback)
    trainer.train()
    first = callback.auto
    assert not trainer.model._forward_hooks and "step" not in vars(trainer.lr_scheduler)
    trainer.train()
    assert callback.auto is not first and callback.auto.num_steps == STEPS


def test_lora_trains_its_adapters_alone_and_resumes_bit_equal(tmp_path):
    peft = needed("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")

    def trainer_of(callback):
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_model(), config)
        return tiny_trainer(tmp_path, callback, model=model, save_strategy="steps", save_steps=30)

    callback = HdetCallback()
    whole = trainer_of(callback)
    frozen = [p.detach().clone() for p in whole.model.parameters() if not p.requires_grad]
    whole.train()
    assert equal(frozen, [p for p in whole.model.parameters() if not p.requires_grad])
    losses = [row["loss"] for row in whole.state.log_history if "loss" in row]
    assert callback.found.lr[0] > 1e-4 and losses[-1] < losses[0]
    resumed = trainer_of(HdetCallback())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-30"))
    assert equal(weights_of(whole.model), weights_of(resumed.model))


def test_two_ranks_find_the_same_and_resume_bit_equal(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(Path(__file__).with_name("trainer_runs.py")),
            str(tmp_path),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == {**second, "rounds": first["rounds"]}
    assert first["num_replicas"] == 2 and first["found"] == first["found_again"]
    assert first["resumes_bit_equal"] and first["found"][0] > 1e-4
    assert first["losses"][-1] < first["losses"][0]
    step, seen = first["rounds"][1]  # what the guard looks at is what the Trainer logs
    assert np.mean(seen) == pytest.approx(np.mean(first["losses"][:step]), rel=1e-3)


def test_two_ranks_differ_within_a_round_and_converge(tmp_path):
    ranks = run_ranks("tests/integrations/trainer_runs.py", tmp_path, "--apart")
    (mine, mine_again), (theirs, theirs_again) = ranks
    assert mine["end"] == theirs["end"] == mine_again["end"] == theirs_again["end"]
    ratios = [one / other for one, other in zip(mine["rates"], theirs["rates"], strict=True)]
    assert [max(ratio, 1 / ratio) for ratio in ratios] == pytest.approx([1.25 / 0.75] * STEPS)
    assert mine["found"] == theirs["found"] > 1e-4
    moved = set(mine["found_lr"].values())
    assert moved and mine["found"] not in moved  # by the controller
    assert mine["found_lr"] == theirs["found_lr"] == mine_again["found_lr"]

    pairs = [torch.tensor(pair) for pair in zip(mine["weights"], theirs["weights"], strict=True)]
    apart = {step for step, (a, b) in enumerate(pairs, start=1) if not torch.equal(a, b)}
    assert apart == {step for step in range(1, STEPS + 1) if step % 8 and step != STEPS}
    assert mine["evaluated"] == theirs["evaluated"]
    assert [step for step, _ in mine["evaluated"]] == [10, 20, 30, 40, 50, 60]
    saved = torch.tensor(some_of(type(tiny_model()).from_pretrained(tmp_path / "checkpoint-35")))
    assert torch.allclose(saved, pairs[34].mean(0), atol=1e-7) and not torch.equal(saved, pairs[34][0])

    assert [step for step, *_ in mine["rounds"]] == [8, 16, 24, 32, 40, 48, 56, STEPS]
    for step, multipliers, has_converged, signal in mine["rounds"]:
        assert all(sorted(group) == [0.75, 1.25] for group in multipliers.values()) and has_converged
        assert len(signal) == (0 if step == STEPS else len(multipliers))  # the last round is too short


def test_a_training_without_a_search_has_the_learning_rate_of_its_arguments(tmp_path, monkeypatch):
    monkeypatch.setattr("hdet.integrations.transformers.searched", None)
    settings = {"learning_rate": 0.01, "warmup_steps": 5, "save_strategy": "steps", "save_steps": 35}
    callback, spy = HdetCallback(search=False), Spy()
    whole = tiny_trainer(tmp_path, callback, spy, **settings)
    whole.train()
    assert callback.found is None and set(callback.auto.found_lr.values()) == {0.01}
    recipe = Recipe(total_steps=STEPS)
    assert spy.rates == pytest.approx([0.01 * recipe.shape(step) for step in range(STEPS)])
    again = HdetCallback(search=False)
    resumed = tiny_trainer(tmp_path, again, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-35"))
    assert equal(weights_of(whole.model), weights_of(resumed.model)) and again.found is None


def test_a_wrong_spread_is_refused_before_a_search():
    with pytest.raises(ValueError, match="spread must be a number in"):
        HdetCallback(spread=1.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": 20}, "a shorter run cannot afford a search"),
        ({"label_smoothing_factor": 0.1}, re.escape("HdetCallback(loss=...)")),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 5}, "linear"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(tmp_path, changes, message):
    with pytest.raises((hdet.HdetError, ValueError), match=message):
        tiny_trainer(tmp_path, HdetCallback(), evaluates=True, **changes).train()


def test_a_model_that_returns_no_loss_is_refused_with_the_remedy(tmp_path):
    data = [{"input_ids": row["input_ids"]} for row in tiny_data()]
    with pytest.raises(hdet.HdetError, match="labels"):
        tiny_trainer(tmp_path, HdetCallback(), data=data).train()


def test_a_checkpoint_without_our_state_is_refused_with_the_remedy(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 30}
    tiny_trainer(tmp_path, **settings).train()
    with pytest.raises(hdet.HdetError, match="no state of hdet"):
        tiny_trainer(tmp_path, HdetCallback(), **settings).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-30")
        )


def test_a_loss_of_ones_own(tmp_path):
    def compute(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())

    def loss(model, batch):
        return compute(model(input_ids=batch["input_ids"]), batch["labels"])

    trainer = tiny_trainer(tmp_path, HdetCallback())
    trainer.compute_loss_func = compute
    with pytest.raises(hdet.HdetError, match=re.escape("HdetCallback(loss=...)")):
        trainer.train()
    callback = HdetCallback(loss=loss)

    def observed(outputs, labels, num_items_in_batch=None):
        value = compute(outputs, labels)
        callback.auto.observe(value)
        return value

    trainer = tiny_trainer(tmp_path, callback)
    trainer.compute_loss_func = observed
    trainer.train()
    assert callback.found.lr[0] > 1e-4 and callback.auto.num_steps == STEPS

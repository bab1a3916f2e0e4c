"""HdetCallback explores weight decay: the numbers of a plain loop, checkpoints, and ranks."""

from __future__ import annotations

import random

import pytest
import torch

import hdet

pytest.importorskip("transformers", reason="transformers is not installed; make test-integrations runs them")
from transformers import Trainer, TrainerCallback

from hdet.integrations.transformers import HdetCallback
from tests.integrations import wrong_labels as task
from tests.integrations.cards import snippet
from tests.integrations.launch import run_ranks
from tests.integrations.trainer_held_out import flat, train, trainer_of

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's own deprecations and more
    pytest.mark.filterwarnings("error::hdet.HdetWarning"),
]


@pytest.mark.parametrize("has_probe", [False, True], ids=["batches", "hdet.Probe"])
def test_evaluation_data_moves_the_weight_decay_as_in_a_plain_loop(tmp_path, has_probe):
    trainer, records = trainer_of(tmp_path), hdet.Records()
    probe = hdet.Probe(trainer.get_eval_dataloader(), lambda model, batch: model(**batch)["loss"])
    callback = train(trainer, records, **({"probe": probe} if has_probe else {}))
    twin = trainer_of(tmp_path)
    model, expected = task.plain_loop(twin.model.net, twin.create_optimizer())
    assert [step for step, _ in task.decays(records)] == list(range(40, 181, 10))
    assert task.decays(records) == task.decays(expected)
    assert callback.auto.base["weight_decay"] == task.decays(records)[-1][1] > 100 * task.DECAY
    assert flat(trainer.model) == flat(model)


def test_looks_at_the_probe_leave_no_trace(tmp_path, monkeypatch):
    class Spy(TrainerCallback):
        def __init__(self):
            self.states, self.evaluations = [], 0

        def on_step_end(self, args, state, control, **_):
            self.states.append((hash(torch.get_rng_state().numpy().tobytes()), random.random()))

        def on_evaluate(self, args, state, control, **_):
            self.evaluations += 1

    monkeypatch.setattr("hdet.method.weight_decay.moved", lambda state, *_, **__: state)
    ends, spies, left = [], [], []
    for changes in ({}, {"controllers": (), "probe": None}):
        random.seed(3)
        trainer, records = trainer_of(tmp_path), hdet.Records()
        trainer.add_callback(spy := Spy())
        references = len(trainer.accelerator.gradient_state.dataloader_references)
        train(trainer, records, **changes)
        left.append(len(trainer.accelerator.gradient_state.dataloader_references) - references)
        assert len(task.decays(records)) == (0 if changes else 15)
        ends.append(flat(trainer.model))
        spies.append(spy)
    assert ends[0] == ends[1] and left[0] == left[1]
    assert spies[0].states == spies[1].states and len(spies[0].states) == task.NUM_STEPS
    assert spies[0].evaluations == 0


@pytest.mark.parametrize("step", [105, 188], ids=["between looks", "within the tail"])
def test_a_resumed_training_is_bit_equal(tmp_path, step):
    settings = {"save_strategy": "steps", "save_steps": step}
    whole, first = trainer_of(tmp_path, **settings), hdet.Records()
    callback = train(whole, first)
    resumed, records = trainer_of(tmp_path, **settings), hdet.Records()
    again = train(resumed, records, checkpoint=tmp_path / f"checkpoint-{step}")
    assert flat(resumed.model) == flat(whole.model)
    assert again.auto.base == callback.auto.base
    assert task.decays(records) == [row for row in task.decays(first) if row[0] > step]


def test_a_loss_of_ones_own_scores_the_probe_too(tmp_path):
    scored = []

    def loss(model, batch):
        assert not model.training and not torch.is_grad_enabled()
        scored.append(len(batch["x"]))
        return 2 * model(**batch)["loss"]

    records, own = hdet.Records(), hdet.Records()
    train(trainer_of(tmp_path), records)
    train(trainer_of(tmp_path), own, loss=loss)
    assert scored == [32] * (1 + 8 * 2 * 15)  # once when it is built; then parts, scales, looks
    seen, doubled = (task.looks(r)[0] for r in (records, own))
    assert doubled.held_out_loss == pytest.approx(2 * seen.held_out_loss, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"controllers": [hdet.HeldOutWeightDecay()]},
            "probe must be given for a HeldOutWeightDecay, got None",
        ),
        ({"explore": hdet.WeightDecay(), "probe": []}, "explore must be a list of hyperparameters"),
        ({"probe": "eval"}, "probe must be held-out batches"),
    ],
)
def test_wrong_use_is_refused_before_a_search(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        HdetCallback(**arguments)


def test_two_ranks_look_at_their_parts_together_and_resume(tmp_path):
    mine, theirs = run_ranks("tests/integrations/trainer_held_out.py", tmp_path)
    for one, other in zip(mine, theirs, strict=True):
        assert one["end"] == other["end"] and one["base"] == other["base"]
    first, again = mine
    assert first["end"] == again["end"] and first["base"] == again["base"]
    steps = [step for step, _ in first["decays"]]
    assert steps == list(range(40, 181, 10)) and first["decays"][-1][1] > 100 * task.DECAY
    assert again["decays"] == [row for row in first["decays"] if row[0] > 105]
    # One process with the same batches and all of the held-out rows has the same loss.
    twin = trainer_of(tmp_path)
    _, records = task.plain_loop(twin.model.net, twin.create_optimizer())
    alone = task.looks(records)[0]
    assert first["held_out"][0] == pytest.approx(alone.held_out_loss, rel=1e-5)


def test_the_snippet_of_the_card(tmp_path):
    made = trainer_of(tmp_path)
    names = {"hdet": hdet, "HdetCallback": HdetCallback, "Trainer": Trainer, "args": made.args}
    names |= {"model": made.model, "data": made.train_dataset, "held_out": made.eval_dataset}
    exec(snippet("transformers_weight_decay"), names)
    callback = names["callback"]
    assert callback.found.total_steps == task.NUM_STEPS
    assert callback.auto.base["weight_decay"] > 10 * task.DECAY

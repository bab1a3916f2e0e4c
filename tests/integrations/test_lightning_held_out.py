"""LearningRateSearch explores weight decay: the numbers of a plain loop, and nothing else notices it."""

from __future__ import annotations

import functools

import pytest
import torch

import hdet

pytest.importorskip("lightning", reason="lightning is not installed; make test-integrations runs them")
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from hdet.integrations.lightning import LearningRateSearch
from tests.integrations import wrong_labels as task
from tests.integrations.cards import snippet
from tests.integrations.launch import run_ranks
from tests.integrations.lightning_held_out import Classifier, exploring, fit, flat, held_out, train_loader

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Lightning warns of workers, of torch's own deprecations and more
    pytest.mark.filterwarnings("error::hdet.HdetWarning"),
]


@pytest.mark.parametrize("has_probe", [False, True], ids=["batches", "hdet.Probe"])
def test_held_out_batches_move_the_weight_decay_as_in_a_plain_loop(has_probe):
    probe = hdet.Probe(held_out(), lambda module, batch: task.loss_of(module.net, batch))
    records = hdet.Records()
    module = fit(exploring(records, probe=probe if has_probe else held_out()))
    model, expected = task.plain_loop(task.net())
    assert [step for step, _ in task.decays(records)] == list(range(40, 181, 10))
    assert task.decays(records) == task.decays(expected)
    assert task.decays(records)[-1][1] > 100 * task.DECAY
    assert flat(module.net) == flat(model)


class Logger(CSVLogger):
    """Keeps what it is told."""

    def __init__(self, folder):
        super().__init__(folder)
        self.told = []

    def log_metrics(self, metrics, step=None):
        self.told.append({name: value for name, value in metrics.items() if name != "lr"})


def test_nothing_sees_a_look_at_the_probe(tmp_path):
    # With a weight decay that stays as it is, both runs have the same weights.
    frozen = pytest.MonkeyPatch()
    frozen.setattr("hdet.method.weight_decay.moved", lambda state, *_, **__: state)
    loggers = [Logger(tmp_path), Logger(tmp_path)]
    with frozen.context():
        looking = fit(exploring(records := hdet.Records()), logger=loggers[0])
    frozen.undo()
    plain = fit(LearningRateSearch(search=False), logger=loggers[1])
    assert len(task.decays(records)) == 15
    assert looking.seen == plain.seen and len(plain.seen) == task.NUM_STEPS
    assert loggers[0].told == loggers[1].told and loggers[0].told
    assert flat(looking) == flat(plain)


@pytest.mark.parametrize("epoch", [9, 23], ids=["between looks", "within the tail"])
def test_a_resumed_run_is_bit_exact(tmp_path, epoch):
    every = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    search, records = exploring(first := hdet.Records()), hdet.Records()
    whole = fit(search, every)
    again = exploring(records)
    resumed = fit(again, ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
    assert flat(resumed) == flat(whole)
    later = [row for row in task.decays(first) if row[0] > (epoch + 1) * 8]
    assert task.decays(records) == later and (later or epoch == 23)
    assert again.auto.base == search.auto.base


def test_the_search_and_the_exploration_go_together():
    records = hdet.Records()
    search = exploring(records, search=True, controllers=[hdet.HeldOutWeightDecay(start="auto")])
    fit(search)
    first = 5 / (search.found.lr[0] * task.NUM_STEPS)
    assert records[1].base["weight_decay"] == pytest.approx(first)
    assert task.decays(records)[-1][1] != pytest.approx(first)


def test_the_search_scores_on_held_out_batches(monkeypatch):
    scored = []

    def searched(*given, probe, **settings):
        scored.append(probe)
        return hdet.find_lr(*given, probe=probe, **settings)

    monkeypatch.setattr("hdet.tuning.find_lr", searched)
    fit(exploring(search=True))
    fit(exploring(search=True, probe=hdet.Probe(held_out(), lambda m, batch: task.loss_of(m.net, batch))))
    assert scored[-1] is None and len(scored[0]) == len(list(held_out()))
    for (batch,), expected in zip(scored[0], held_out(), strict=True):
        assert all(map(torch.equal, batch, expected))


def test_held_out_batches_have_the_precision_of_the_run():
    kinds = set()

    class Watched(Classifier):
        def training_step(self, batch, batch_idx):
            if not self.training:
                kinds.add((self.net(batch[0]).dtype, torch.is_grad_enabled()))
            return super().training_step(batch, batch_idx)

    fit(exploring(), module=Watched(), precision="bf16-mixed")
    assert kinds == {(torch.bfloat16, False)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"controllers": [hdet.HeldOutWeightDecay()]},
            "probe must be given for a HeldOutWeightDecay, got None",
        ),
        ({"explore": hdet.WeightDecay(), "probe": []}, "explore must be a list of hyperparameters"),
        ({"probe": torch.zeros(3)}, "probe must be held-out batches"),
        ({"probe": "val"}, "probe must be held-out batches"),
    ],
)
def test_wrong_use_is_refused_before_a_search(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LearningRateSearch(**arguments)


def test_two_ranks_look_at_their_parts_together_and_resume(tmp_path):
    mine, theirs = run_ranks("tests/integrations/lightning_held_out.py", tmp_path)
    for one, other in zip(mine, theirs, strict=True):
        assert one["end"] == other["end"] and one["base"] == other["base"]
    first, again = mine
    assert first["end"] == again["end"] and first["base"] == again["base"]
    steps = [step for step, _ in first["decays"]]
    assert steps == list(range(40, 181, 10)) and first["decays"][-1][1] > 100 * task.DECAY
    assert again["decays"] == [row for row in first["decays"] if row[0] > 104]
    # One process with the same batches and all of the held-out rows has the same loss.
    _, records = task.plain_loop(task.net())
    alone = task.looks(records)[0]
    assert first["held_out"][0] == pytest.approx(alone.held_out_loss, rel=1e-5)


def test_the_snippet_of_the_card():
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
    module, names = Classifier(), {"hdet": hdet, "LearningRateSearch": LearningRateSearch}
    names |= {"module": module, "loader": train_loader(1, 0), "held_out": held_out()}
    names["Trainer"] = functools.partial(lightning.Trainer, **quiet)
    exec(snippet("lightning_weight_decay").replace("max_epochs=10", f"max_epochs={task.NUM_EPOCHS}"), names)
    search = names["search"]
    assert search.found.total_steps == task.NUM_STEPS
    assert search.auto.base["weight_decay"] > 10 * task.DECAY

"""Small Trainers for the tests, and the runs that torchrun starts: python -m ... trainer_runs.py FOLDER.

With ``--apart`` the ranks' learning rates differ, and there are evaluations and a checkpoint within rounds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import hdet
from hdet.integrations.transformers import HdetCallback
from hdet.round_record import ComparingRecord
from tests.integrations.launch import leave

STEPS, BATCH = 60, 8


def tiny_model(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32,
            n_positions=12,
            n_embd=16,
            n_layer=1,
            n_head=2,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def tiny_data(size: int = STEPS * BATCH) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards by a step of their own."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(32, (size, 1), generator=generator)
    strides = torch.randint(1, 4, (size, 1), generator=generator)
    rows = (starts + strides * torch.arange(12)) % 32
    return [{"input_ids": row, "labels": row} for row in rows]


def tiny_trainer(
    folder: Path,
    *callbacks: Any,
    model: Any = None,
    data: Any = None,
    evaluates: bool = False,
    **changes: Any,
) -> Trainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return Trainer(
        model=tiny_model() if model is None else model,
        args=TrainingArguments(**{**settings, **changes}),
        train_dataset=tiny_data() if data is None else data,
        eval_dataset=tiny_data(32) if evaluates else None,
        callbacks=list(callbacks),
    )


def weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


class Spy(TrainerCallback):
    """Notes learning rate and weights of this rank: at steps before a save, and at evaluations."""

    def __init__(self) -> None:
        self.rates, self.weights, self.evaluated = [], [], []

    def on_step_begin(self, args, state, control, *, optimizer, **_):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args, state, control, *, model, **_):
        self.weights.append(some_of(model))

    def on_evaluate(self, args, state, control, *, model, **_):
        self.evaluated.append((state.global_step, some_of(model)))


def some_of(model: torch.nn.Module) -> list[float]:
    return torch.cat([w.flatten() for w in weights_of(model)])[::40].tolist()


def train_apart(folder: Path) -> None:
    """Train on ranks that differ, resume from within a round, and write what every rank has got."""
    answers = []
    for checkpoint in (None, str(folder / "checkpoint-35")):
        spy, records = Spy(), hdet.Records()
        callback = HdetCallback(spread=0.25, controllers=[hdet.Controller()], sync_every=8, records=records)
        trainer = tiny_trainer(
            folder,
            spy,
            callback,
            model=tiny_model(dropout=0.1),
            evaluates=True,
            eval_strategy="steps",
            eval_steps=10,
            save_strategy="steps",
            save_steps=35,
            ddp_backend="gloo",
            per_device_train_batch_size=4,
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        assert callback.auto is not None and callback.found is not None
        answers.append(
            {
                "found": callback.found.lr[0],
                "found_lr": callback.auto.found_lr,
                "rates": spy.rates,
                "weights": spy.weights,
                "evaluated": spy.evaluated,
                "end": [w.tolist() for w in weights_of(trainer.model)],
                "rounds": [
                    (r.step, r.multipliers, r.converged, r.section(ComparingRecord).signal)
                    for r in records
                    if r.ends_round and r.search is None
                ],
            }
        )
    (folder / f"rank{trainer.args.process_index}.json").write_text(json.dumps(answers))


def main(folder: Path) -> None:
    """Train on these ranks, resume from the middle, and write what every rank has got."""
    settings = {
        "save_strategy": "steps",
        "save_steps": 35,
        "ddp_backend": "gloo",
        "per_device_train_batch_size": 4,
    }
    records = hdet.Records()
    callback = HdetCallback(records=records)
    trainer = tiny_trainer(folder, callback, model=tiny_model(dropout=0.1), **settings)
    trainer.train()
    again = HdetCallback()
    resumed = tiny_trainer(folder, again, model=tiny_model(dropout=0.1), **settings)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-35"))
    ends = [torch.cat([w.flatten() for w in weights_of(t.model)]) for t in (trainer, resumed)]
    assert callback.found is not None and callback.auto is not None and again.found is not None
    answer = {
        "found": callback.found.lr,
        "found_again": again.found.lr,
        "num_replicas": callback.auto.replicas.count,
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "resumes_bit_equal": torch.equal(*ends),
        "end": ends[0].tolist(),
        "rounds": [(r.step, r.losses) for r in records],
    }
    (folder / f"rank{trainer.args.process_index}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    (train_apart if "--apart" in sys.argv else main)(Path(sys.argv[1]))
    leave()

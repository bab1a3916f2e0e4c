"""A model that learns wrong labels by heart in a Trainer, and the runs that torchrun starts on two ranks."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import hdet
from hdet.integrations.transformers import HdetCallback
from tests.integrations import wrong_labels as task
from tests.integrations.launch import leave


class WithLoss(nn.Module):
    """As models of transformers are: they return their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = task.net()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": task.loss_of(self.net, (x, y))}


def examples(data: Any) -> list[dict[str, Tensor]]:
    return [{"x": x, "y": y} for x, y in data]


def trainer_of(folder: Path, num_ranks: int = 1, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": task.NUM_STEPS,
        "per_device_train_batch_size": task.BATCH_SIZE // num_ranks,
        "per_device_eval_batch_size": 64 // num_ranks,
        "learning_rate": task.LR,
        "weight_decay": task.DECAY,
        "optim": "adamw_torch",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "logging_steps": task.NUM_STEPS,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo" if num_ranks > 1 else None,
        "dataloader_pin_memory": False,
    }
    return Trainer(
        model=WithLoss(),
        args=TrainingArguments(**(settings | changes)),
        train_dataset=examples(task.rows()),  # pyright: ignore[reportArgumentType]
        eval_dataset=examples(task.held_out_rows()),  # pyright: ignore[reportArgumentType]
    )


def train(
    trainer: Trainer, records: hdet.Records | None = None, *, checkpoint: Path | None = None, **changes: Any
) -> HdetCallback:
    """Train with weight decay that the Trainer's own evaluation data moves."""
    settings: dict[str, Any] = {"controllers": [hdet.HeldOutWeightDecay()], "search": False}
    if "probe" not in changes:
        changes["probe"] = trainer.get_eval_dataloader()
    callback = HdetCallback(records=records, **(settings | changes))
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return callback


def flat(model: Any) -> list[float]:
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def main(folder: Path) -> None:
    """Train on two ranks, each with its part of the evaluation data, and resume from the middle."""
    warnings.simplefilter("ignore")
    answers, rank = [], 0
    for checkpoint in (None, folder / "checkpoint-105"):
        trainer, records = trainer_of(folder, 2, save_strategy="steps", save_steps=105), hdet.Records()
        callback, rank = train(trainer, records, checkpoint=checkpoint), trainer.args.process_index
        assert callback.auto is not None
        answers.append(
            {
                "decays": task.decays(records),
                "held_out": [look.held_out_loss for look in task.looks(records)],
                "base": callback.auto.base,
                "end": flat(trainer.model),
            }
        )
    (folder / f"rank{rank}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()

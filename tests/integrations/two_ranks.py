"""Started by torchrun: a run on two ranks, and another that goes on from one of its checkpoints.

With ``--apart`` the ranks' learning rates differ, and there are validations and checkpoints within rounds.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

import lightning
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import hdet
from hdet.integrations.lightning import LearningRateSearch
from hdet.round_record import ComparingRecord
from tests.integrations.launch import leave
from tests.integrations.lightning_modules import Net, held_out, loader


class Spy(Callback):
    """Notes learning rate and weights of this rank: at steps before a save, and at validations."""

    def __init__(self) -> None:
        self.rates, self.weights, self.validated = [], [], []

    def on_train_batch_start(self, trainer, *_) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, module, *_) -> None:
        self.weights.append(flat(module))

    def on_validation_start(self, trainer, module) -> None:
        self.validated.append((trainer.global_step, flat(module)))


def flat(module: Net) -> list[float]:
    return [value for p in module.parameters() for value in p.flatten().tolist()]


def fit_apart(folder: Path, ckpt_path: Path | None = None) -> dict[str, object]:
    module, spy, records = Net(lr=0.01), Spy(), hdet.Records()
    search = LearningRateSearch(
        search=False, spread=0.25, controllers=[hdet.Controller()], sync_every=8, records=records
    )
    every = {"save_top_k": -1, "auto_insert_metric_name": False}
    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=5,
        callbacks=[
            search,
            spy,
            ModelCheckpoint(folder, "{step}", every_n_train_steps=15, **every),
            ModelCheckpoint(folder, "weights{step}", every_n_train_steps=13, save_weights_only=True, **every),
        ],
    )
    trainer.fit(module, loader(), held_out(), ckpt_path=ckpt_path)
    assert "lightning_module_state_dict" not in vars(trainer.strategy)
    return {
        "found_lr": search.auto.found_lr["lr"],
        "rates": spy.rates,
        "weights": spy.weights,
        "validated": spy.validated,
        "end": flat(module),
        "rounds": [
            (r.step, r.ends_round, r.multipliers["lr"], r.converged, r.section(ComparingRecord).signal)
            for r in records
        ],
    }


def fit(folder: Path, ckpt_path: Path | None = None) -> dict[str, object]:
    module, search = Net(), LearningRateSearch(sync_every=7)
    trainer = lightning.Trainer(
        max_epochs=6,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[search, ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
    )
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    weights = [p.flatten().tolist() for p in module.parameters()]
    return {"found": search.found.lr, "weights": weights, "num_steps": search.auto.num_steps}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder = Path(sys.argv[1])
    if "--apart" in sys.argv:
        first = fit_apart(folder / "first")
        again = fit_apart(folder / "again", folder / "first" / "45.ckpt")
    else:
        first = fit(folder / "first")
        again = fit(folder / "again", folder / "first" / "epoch=3.ckpt")
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps([first, again]))


if __name__ == "__main__":
    main()
    leave()

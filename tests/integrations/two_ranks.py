"""Started by torchrun: a run on two ranks, and another that goes on from one of its checkpoints."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

import lightning
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from hdet.integrations.lightning import LearningRateSearch
from tests.integrations.lightning_modules import Net, loader


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
    first = fit(folder / "first")
    again = fit(folder / "again", folder / "first" / "epoch=3.ckpt")
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps([first, again]))


if __name__ == "__main__":
    main()

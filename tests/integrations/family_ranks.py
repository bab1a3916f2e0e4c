"""Started by torchrun on two ranks: cards against the plain loop with DistributedDataParallel.

Usage: family_ranks.py FOLDER NAMES...
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import hdet
from tests.integrations.cards import BATCH, EPOCHS, data, loss_of, net, plain_loop, snippet, task, weights

STEPS = EPOCHS * 30
SAVED_AT = STEPS - 17


def own_loader() -> DataLoader[Any]:
    """This rank's half of every batch."""
    return DataLoader(data(), BATCH // 2, sampler=DistributedSampler(data(), shuffle=False))


def fabric(_: Path) -> tuple[dict[str, Any], list[Any], bool]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    names = task() | {"loader": DataLoader(data(), BATCH // 2)}
    names |= {"fabric": fabric, "net": names["model"]}
    exec(snippet("fabric"), names)
    return names | {"model": names["net"]}, list(names["loader"]), True


def accelerate(_: Path) -> tuple[dict[str, Any], list[Any], bool]:
    from accelerate import Accelerator

    names = task() | {"loader": DataLoader(data(), BATCH // 2), "accelerator": Accelerator(cpu=True)}
    exec(snippet("accelerate"), names)
    return names, list(names["loader"]), True


def deepspeed(folder: Path) -> tuple[dict[str, Any], list[Any], bool]:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now
    deepspeed.init_distributed("gloo")
    names = task() | {"deepspeed": deepspeed, "loader": own_loader()}
    names["config"] = {
        "train_micro_batch_size_per_gpu": BATCH // 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # it is 1.0 otherwise
    }
    exec(snippet("deepspeed"), names)
    return names, list(names["loader"]), _resumes(deepspeed, names, folder / "deepspeed")


def _resumes(deepspeed: Any, done: dict[str, Any], folder: Path) -> bool:
    """Whether a run that accumulates, is saved, and goes on ends as the one that was not interrupted."""
    config = done["config"] | {"gradient_accumulation_steps": 2}
    batches = list(done["loader"]) * EPOCHS * 2
    ends = []
    for is_second in (False, True):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        found = None if is_second else done["found"]
        auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, found=found, sync_every=7)
        engine.lr_scheduler = auto
        if is_second:
            engine.load_checkpoint(str(folder))
        for i in range(2 * SAVED_AT if is_second else 0, 2 * STEPS):
            loss = loss_of(engine, batches[i])
            engine.backward(loss)
            auto.observe(loss)
            engine.step()
            assert auto.num_steps == (i + 1) // 2
            if i + 1 == 2 * SAVED_AT:
                auto.converge()
                engine.save_checkpoint(str(folder))
        ends.append(weights(model))
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def flat(tensors: list[Tensor]) -> list[float]:
    return torch.cat([t.flatten() for t in tensors]).tolist()


def main() -> None:
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", hdet.HdetWarning)
    folder, kinds = Path(sys.argv[1]), sys.argv[2:]
    answers = {}
    for kind in kinds:
        names, batches, resumes = globals()[kind](folder)
        plain = task() | {"loader": [tuple(batch) for batch in batches]}
        bare = plain["model"]
        plain_found = plain_loop(plain | {"model": DistributedDataParallel(bare)})
        answers[kind] = {
            "found": names["found"].lr,
            "plain_found": plain_found.lr,
            "num_replicas": names["auto"].replicas.count,
            "end": flat(weights(names["model"])),
            "plain_end": flat(weights(bare)),
            "resumes": resumes,
        }
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()

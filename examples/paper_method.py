"""The paper's method with its own scheduler: replicas with different learning rates, averaged every 20 steps.

torchrun --standalone --nproc-per-node 2 examples/paper_method.py

`OneCycleAutoLR` takes the place of `OneCycleLR`. It does not search. Give it a good learning rate.
"""

import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import hdet

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
FILES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def windows(files: list[Path], num_batches: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of 64 random windows, and the character that follows each."""
    text = torch.tensor(bytearray(b"".join(file.read_bytes() for file in files)))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - 16, (num_batches, 64, 1), generator=generator)
    return [(codes[:, :16], codes[:, 16]) for codes in text[starts + torch.arange(17)].long()]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.Embedding(256, 16), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 256)
    model = nn.Sequential(*layers)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = windows(FILES[20:], STEPS, seed=dist.get_rank())  # other data on every rank
    scheduler = hdet.OneCycleAutoLR(
        optimizer, max_lr=3e-3, total_steps=STEPS, ensemble_lr_spread_ratio=1 / 9, model_sync_interval=20
    )
    for step, batch in enumerate(batches, start=1):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        if step % 100 == 0:
            print(f"step {step}, rank {dist.get_rank()}: lr {scheduler.get_last_lr()[0]:.5f}", flush=True)
    held_out = [loss_of(model.module, batch).item() for batch in windows(FILES[:20], 30, seed=1)]
    print(f"rank {dist.get_rank()}: held-out loss {sum(held_out) / 30:.4f}")
    dist.destroy_process_group()


main()

"""Find the learning rate on several devices with DistributedDataParallel. Each rank makes some of the trials.

torchrun --standalone --nproc-per-node 2 examples/data_parallel.py
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # any guess
    batches = windows(FILES[20:], STEPS, seed=dist.get_rank())  # other data on every rank
    found = hdet.find_lr(model, optimizer, batches, loss_of, total_steps=STEPS)
    auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, found=found)
    for step, batch in enumerate(batches, start=1):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)  # in place of scheduler.step()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(f"step {step}: training loss {loss.item():.3f}", flush=True)

    if dist.get_rank() == 0:
        print(auto.summary())
        held_out = windows(FILES[:20], 30, seed=1)
        print(f"held-out loss {sum(loss_of(model.module, batch).item() for batch in held_out) / 30:.4f}")
    dist.destroy_process_group()


main() if dist.is_torchelastic_launched() else sys.exit(__doc__)

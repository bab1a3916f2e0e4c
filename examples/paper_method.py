"""The paper's method on two ranks: a checkpoint, noise around it, replicas that differ, and auto-LR.

torchrun --standalone --nproc-per-node 2 examples/paper_method.py
"""

import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

import hdet
from hdet import presets

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
FILES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def windows(files: list[Path], num_batches: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of 64 random windows, and the character that follows each."""
    text = torch.tensor(bytearray(b"".join(file.read_bytes() for file in files)))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - 16, (num_batches, 64, 1), generator=generator)
    return [(codes[:, :16], codes[:, 16]) for codes in text[starts + torch.arange(17)].long()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, seed: int) -> None:
    for x, y in windows(FILES[20:], STEPS, seed):
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss) if isinstance(scheduler, hdet.OneCycleAutoLR) else scheduler.step()


dist.init_process_group("gloo") if dist.is_torchelastic_launched() else sys.exit(__doc__)
torch.manual_seed(0)
layers = nn.Embedding(256, 16), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 256)
model = DistributedDataParallel(nn.Sequential(*layers))
groups = presets.four_groups(model.module, transformer="2.")  # here the hidden layer
optimizer = torch.optim.Adam(groups)
train(model, optimizer, OneCycleLR(optimizer, 3e-3, STEPS), seed=dist.get_rank())  # the checkpoint
hdet.warm_start(model, noise_scale=0.01, norm="global")  # eq. 10: other noise on every replica
optimizer = torch.optim.Adam(groups)
scheduler = hdet.OneCycleAutoLR(optimizer, max_lr=3e-3, **presets.paper(STEPS))  # T is a hundredth of the run
train(model, optimizer, scheduler, seed=2 + dist.get_rank())
held_out = [cross_entropy(model.module(x), y).item() for x, y in windows(FILES[:20], 30, seed=1)]
shown = ", ".join(f"{name} {lr:.2g}" for name, lr in scheduler.ensemble.base.items())
if dist.get_rank() == 0:  # all replicas end with the same weights
    print(f"held-out loss {sum(held_out) / 30:.4f}; shared learning rates {shown}")
dist.destroy_process_group()

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

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
FILES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
GROUPS = {"embedding": "0.weight", "hidden": "2.weight", "head": "4.weight", "no_decay": "bias"}


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
named = list(model.module.named_parameters())
groups = [{"name": g, "params": [p for name, p in named if name.endswith(GROUPS[g])]} for g in GROUPS]
optimizer = torch.optim.AdamW(groups)
train(model, optimizer, OneCycleLR(optimizer, 3e-3, STEPS), seed=dist.get_rank())  # the checkpoint
hdet.warm_start(model, noise_scale=0.01)  # eq. 10: other noise on every replica
settings = {"ensemble_lr_spread_ratio": 1 / 9, "model_sync_interval": STEPS // 50}
controller = {"enable_auto_lr": True, "auto_lr_warmup_steps": STEPS // 3, "loss_scale": "auto"}
decay = 1 - 0.22 ** (1 / 33)  # the paper's run ends at 22 % of the peak, here in 33 rounds
optimizer = torch.optim.AdamW(groups)
scheduler = hdet.OneCycleAutoLR(optimizer, 3e-3, STEPS, decay=decay, **settings, **controller)
train(model, optimizer, scheduler, seed=2 + dist.get_rank())
held_out = [cross_entropy(model.module(x), y).item() for x, y in windows(FILES[:20], 30, seed=1)]
shown = ", ".join(f"{g} {lr:.2g}" for g, lr in zip(GROUPS, scheduler.ensemble.base.values(), strict=True))
if dist.get_rank() == 0:  # all replicas end with the same weights
    print(f"held-out loss {sum(held_out) / 30:.4f}; shared learning rates {shown}")
dist.destroy_process_group()

"""The paper's method on one device: eight virtual replicas, a checkpoint, noise around it, and auto-LR.

python examples/paper_method_one_device.py
"""

import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

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


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


torch.manual_seed(0)
layers = nn.Embedding(256, 16), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 256)
model = nn.Sequential(*layers)
named = list(model.named_parameters())
groups = [{"name": g, "params": [p for name, p in named if name.endswith(GROUPS[g])]} for g in GROUPS]
optimizer = torch.optim.AdamW(groups)
plan = OneCycleLR(optimizer, 3e-3, STEPS)
for batch in windows(FILES[20:], STEPS, seed=0):  # the checkpoint
    loss = loss_of(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    plan.step()
optimizer = torch.optim.AdamW(groups)
plan = OneCycleLR(optimizer, 3e-3, STEPS)
decay = 1 - 0.22 ** (1 / 33)  # the paper's run ends at 22 % of the peak, here in 33 rounds
paper = hdet.Controller(form="paper", start=STEPS // 3, step_size=0.5, momentum=0.9, decay=decay)
settings = {"scheduler": plan, "controllers": [paper], "sync_every": STEPS // 50, "total_steps": STEPS}
ensemble = hdet.VirtualEnsemble(model, optimizer, loss_of, explore=[hdet.LearningRate(1 / 9)], **settings)
ensemble.warm_start(0.01)  # eq. 10: other noise on every replica
for batch in windows(FILES[20:], STEPS, seed=2):
    ensemble.step(batch)
held_out = [loss_of(model, batch).item() for batch in windows(FILES[:20], 30, seed=1)]
shown = ", ".join(f"{g} {group['lr']:.2g}" for g, group in zip(GROUPS, optimizer.param_groups, strict=True))
print(f"{ensemble.summary()}\nheld-out loss {sum(held_out) / 30:.4f}; learning rates {shown}")

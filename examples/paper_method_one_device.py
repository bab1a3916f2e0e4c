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
from hdet import presets

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


torch.manual_seed(0)
layers = nn.Embedding(256, 16), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 256)
model = nn.Sequential(*layers)
groups = presets.four_groups(model, transformer="2.")  # here the hidden layer
optimizer = torch.optim.Adam(groups)
plan = OneCycleLR(optimizer, 3e-3, STEPS)
for batch in windows(FILES[20:], STEPS, seed=0):  # the checkpoint
    loss = loss_of(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    plan.step()
optimizer = torch.optim.Adam(groups)
settings = presets.paper_ensemble(STEPS)  # T is a hundredth of the run
plan = OneCycleLR(optimizer, 3e-3, STEPS)
ensemble = hdet.VirtualEnsemble(model, optimizer, loss_of, num_replicas=8, scheduler=plan, **settings)
ensemble.warm_start(0.01, norm="global")  # eq. 10: other noise on every replica
for batches in zip(*(windows(FILES[20:], STEPS, seed=2 + replica) for replica in range(8)), strict=True):
    ensemble.step(batches=batches)  # replicas are compared on batches of their own (eq. 4)
held_out = [loss_of(model, batch).item() for batch in windows(FILES[:20], 30, seed=1)]
shown = ", ".join(f"{group['name']} {group['lr']:.2g}" for group in optimizer.param_groups)
print(f"{ensemble.summary()}\nheld-out loss {sum(held_out) / 30:.4f}; learning rates {shown}")

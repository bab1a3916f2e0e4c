"""Find the learning rate, save checkpoints, and go on from the last one when the script is started again.

python examples/checkpoints.py

Stop it with Ctrl-C and start it again. It does not search again, and ends with the same numbers.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

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


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # any guess
batches = windows(FILES[20:], STEPS, seed=0)  # your DataLoader
folder = Path("runs/checkpoints")

is_new = not any(folder.glob("*.pt"))  # a checkpoint knows what was found
found = hdet.find_lr(model, optimizer, batches, loss_of, total_steps=STEPS) if is_new else None
auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, found=found)
parts = {"model": model, "optimizer": optimizer, "auto": auto}
hdet.load_checkpoint(folder, **parts)  # if there is one
for step, batch in enumerate(batches[auto.num_steps :], start=auto.num_steps + 1):
    loss = loss_of(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    auto.step(loss)  # in place of scheduler.step()
    if step % 100 == 0:
        auto.converge()  # before a save, on every rank
        hdet.save_checkpoint(folder, step=step, **parts)
        print(f"step {step}: training loss {loss.item():.3f}", flush=True)

print(auto.summary())
held_out = windows(FILES[:20], 30, seed=1)
print(f"held-out loss {sum(loss_of(model, batch).item() for batch in held_out) / 30:.4f}")

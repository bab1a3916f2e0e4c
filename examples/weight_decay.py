"""Find the weight decay in the run, by held-out data. The training text is short, so it repeats.

python examples/weight_decay.py
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


def windows(text: bytes, num_batches: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of 64 random windows, and the character that follows each."""
    codes = torch.tensor(bytearray(text))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(codes) - 16, (num_batches, 64, 1), generator=generator)
    return [(window[:, :16], window[:, 16]) for window in codes[starts + torch.arange(17)].long()]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
train, held_out, test = (b"".join(f.read_bytes() for f in FILES[i::3]) for i in range(3))
batches = windows(train[:20_000], STEPS, seed=0)

probe = hdet.Probe(windows(held_out, 8, seed=1), loss_of)  # 512 examples that are not trained on
found = hdet.find_lr(model, optimizer, batches, loss_of, total_steps=STEPS)
steering = {"controllers": [hdet.HeldOutWeightDecay()], "probe": probe}
auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, found=found, **steering)
for step, batch in enumerate(batches, start=1):
    loss = loss_of(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    auto.step(loss)
    if step % 100 == 0:
        print(f"step {step}: training loss {loss.item():.3f}, weight decay {auto.base['weight_decay']:.3g}")

print(auto.summary())
losses = [loss_of(model, batch).item() for batch in windows(test, 30, seed=2)]
print(f"test loss {sum(losses) / 30:.4f}")

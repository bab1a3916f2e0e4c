"""Find the weight decay in the run on several devices. Each rank holds a part of the held-out data.

torchrun --standalone --nproc-per-node 2 examples/weight_decay_on_ranks.py
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


def windows(text: bytes, num_batches: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of 64 random windows, and the character that follows each."""
    codes = torch.tensor(bytearray(text))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(codes) - 16, (num_batches, 64, 1), generator=generator)
    return [(window[:, :16], window[:, 16]) for window in codes[starts + torch.arange(17)].long()]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = nn.Embedding(256, 16), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 256)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    train, held_out, test = (b"".join(f.read_bytes() for f in FILES[i::3]) for i in range(3))
    probe = hdet.Probe(windows(held_out, 4, seed=10 + rank), loss_of)  # other data on every rank
    controllers = [hdet.HeldOutWeightDecay()]
    auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, controllers=controllers, probe=probe)
    for batch in windows(train[:20_000], STEPS, seed=rank):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)

    if rank == 0:
        print(auto.summary())
        losses = [loss_of(model.module, batch).item() for batch in windows(test, 30, seed=2)]
        print(f"test loss {sum(losses) / 30:.4f}")
    dist.destroy_process_group()


main() if dist.is_torchelastic_launched() else sys.exit(__doc__)

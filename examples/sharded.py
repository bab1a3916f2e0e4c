"""Find the learning rate of a model that is sharded over ranks: two replicas of two ranks each.

torchrun --standalone --nproc-per-node 4 examples/sharded.py
"""

import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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


def main() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    layers = nn.Embedding(256, 16), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 256)
    model = nn.Sequential(*layers)
    for part in (model[0], model[2], model[4], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # any guess
    batches = windows(FILES[20:], STEPS, seed=dist.get_rank())  # other data on every rank

    found = hdet.find_lr(model, optimizer, batches, loss_of, total_steps=STEPS, replicas=mesh["replicate"])
    auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, found=found, replicas=mesh["replicate"])
    for batch in batches:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)  # in place of scheduler.step()
    held_out = [loss_of(model, batch).item() for batch in windows(FILES[:20], 30, seed=1)]  # on every rank
    if dist.get_rank() == 0:
        print(auto.summary())
        print(f"held-out loss {sum(held_out) / 30:.4f}")
    dist.destroy_process_group()


main() if dist.is_torchelastic_launched() else sys.exit(__doc__)

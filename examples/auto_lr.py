"""A plain data-parallel loop that finds its learning rate with `hdet.find_lr` and `hdet.AutoLR`.

    python examples/auto_lr.py                                               # one process
    torchrun --standalone --nproc-per-node 2 examples/auto_lr.py             # two replicas
    torchrun --standalone --nproc-per-node 2 examples/auto_lr.py --resume

The task is to predict a character in the source text of Python's standard library from the 16 before it. The
learning rate that you give may be wrong by a factor of 100. A checkpoint is written every 100 steps.
``--resume`` goes on from the last one after a crash or Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import hdet

LENGTH, VOCABULARY, BATCH_SIZE = 16, 128, 64


def load_text() -> tuple[Tensor, Tensor]:
    """Training and held-out text, as character codes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    codes = torch.frombuffer(bytearray(text.encode("ascii", errors="replace")), dtype=torch.uint8)
    return codes[: -len(codes) // 10], codes[-len(codes) // 10 :]


def windows(text: Tensor, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random windows and the character that follows each. The same seed gives the same windows."""
    starts = torch.randint(len(text) - LENGTH, (size, 1), generator=torch.Generator().manual_seed(seed))
    codes = text[starts + torch.arange(LENGTH + 1)].long()
    return codes[:, :-1], codes[:, -1]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps (default 1000)")
    parser.add_argument("--lr", type=float, default=1e-5, help="where the search starts (default 1e-5)")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("runs/auto_lr"), help="folder of checkpoints"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    args = parser.parse_args()
    if not args.resume and any(args.checkpoints.glob("*.pt")):
        raise SystemExit(f"{args.checkpoints} has checkpoints: pass --resume, or another --checkpoints")

    if "RANK" in os.environ:  # torchrun has started this process
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    train_text, held_out_text = load_text()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(VOCABULARY, 16),
        nn.Flatten(),
        nn.Linear(16 * LENGTH, 128),
        nn.GELU(),
        nn.Linear(128, VOCABULARY),
    )
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    held_out = windows(held_out_text, 2000, seed=1)

    def batch_of(step: int) -> tuple[Tensor, Tensor]:
        return windows(train_text, BATCH_SIZE, seed=1_000_003 * (step + 1) + rank)

    found = None
    if not args.resume:  # a checkpoint knows what was found
        found = hdet.find_lr(model, optimizer, map(batch_of, count()), loss_of, total_steps=args.steps)
    auto = hdet.AutoLR(optimizer, total_steps=args.steps, model=model, found=found)

    parts = {"model": model, "optimizer": optimizer, "auto": auto}
    if args.resume and hdet.load_checkpoint(args.checkpoints, **parts) is None:
        raise SystemExit(f"--resume needs a checkpoint in {args.checkpoints}: start without --resume")

    for step in range(auto.num_steps, args.steps):
        loss = loss_of(model, batch_of(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)  # in place of scheduler.step()
        if (step + 1) % 100 == 0:
            auto.converge()  # on every rank, before a save
            hdet.save_checkpoint(args.checkpoints, step=step + 1, **parts)  # rank zero writes
            if rank == 0:
                print(f"step {step + 1}: training loss {loss.item():.3f}", flush=True)

    if rank == 0:
        print(auto.summary())
        print(f"held-out loss {loss_of(net, held_out).item():.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

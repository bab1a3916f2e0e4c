"""Train a small character-level GPT on the source text of Python's standard library, on several replicas.

    torchrun --standalone --nproc-per-node 4 research/charlm_on_ranks/training.py --help

This shows the parts of the paper's method with ``hdet.Ensemble``. To find a learning rate, see
examples/one_device.py.
Every replica trains with its own learning rate around the shared schedule. Every ``--sync-every`` steps the
replicas compare losses, average their parameters and move the base. The folder ``--out`` keeps the settings,
a record per round and the last checkpoint. Ctrl-C stops cleanly. The same command with ``--resume`` goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.round_record import ComparingRecord

VOCABULARY = 128  # ASCII; the few other characters become "?"


def corpus(max_bytes: int) -> tuple[Tensor, Tensor]:
    """Training and evaluation text, as character codes: every twentieth file is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not {"test", "tests", "site-packages"} & set(p.parts))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    total = 0
    for i, file in enumerate(files):
        text = file.read_text(encoding="utf-8", errors="replace").encode("ascii", errors="replace")
        parts[i % 20 == 0].append(text)
        total += len(text)
        if total > max_bytes:
            break
    train, held_out = (
        torch.frombuffer(bytearray(b"\n".join(parts[k])), dtype=torch.uint8) for k in (False, True)
    )
    return train, held_out


def batches(text: Tensor, size: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random windows of the text, from a private generator."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(text) - length - 1, (size, 1), generator=generator)
        window = text[starts + offsets].long()
        yield window[:, :-1], window[:, 1:]


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer, with residual connections."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A small decoder."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next character at every position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of the next character."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, length: int) -> float:
    """Bits per character on the same held-out windows every time."""
    stream = batches(text, 32, length, seed=999)
    losses = [loss_of(model, next(stream)).item() for _ in range(8)]
    return sum(losses) / len(losses) / math.log(2)


def parse_arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps (default 500)")
    parser.add_argument("--max-lr", type=float, default=3e-3, help="peak learning rate (default 3e-3)")
    parser.add_argument(
        "--spread", type=float, default=1 / 9, help="half-width of the multipliers; 0 is plain DDP"
    )
    parser.add_argument("--sync-every", type=int, default=25, help="steps per round (default 25)")
    parser.add_argument(
        "--controller-start", type=int, default=100, help="step from which the controller acts"
    )
    parser.add_argument(
        "--controller",
        choices=("log", "paper", "none"),
        default="log",
        help="log (ours): a correction of the schedule; paper: eq. 7, decay to the floor; none: average only",
    )
    parser.add_argument("--batch", type=int, default=16, help="sequences per replica and step (default 16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/charlm"), help="folder of the run")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    return parser.parse_args()


def main() -> None:
    """One training."""
    args = parse_arguments()
    stop_asked = torch.zeros(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop_asked.fill_(1))
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    console = Console(quiet=rank != 0)
    records_path, checkpoint_path = args.out / "records.jsonl", args.out / "checkpoint.pt"
    if rank == 0 and not args.resume:
        if args.out.exists():  # an earlier run is kept beside the new one
            args.out.rename(args.out.with_name(f"{args.out.name}-{time.strftime('%Y%m%d-%H%M%S')}"))
        args.out.mkdir(parents=True)
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        (args.out / "settings.json").write_text(
            json.dumps(settings | {"replicas": world_size}, indent=1) + "\n"
        )
    dist.barrier()

    torch.manual_seed(args.seed)
    train_text, held_out = corpus(max_bytes=8_000_000)
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    controllers = {
        "log": [hdet.Controller(form="log", start=args.controller_start)],
        "paper": [hdet.Controller(form="paper", start=args.controller_start, end="floor")],
        "none": [],
    }
    ensemble = hdet.Ensemble(
        optimizer,
        scheduler=OneCycleLR(optimizer, args.max_lr, total_steps=args.steps, anneal_strategy="linear"),
        model=model,
        explore=[hdet.LearningRate(args.spread, floor=args.max_lr / (25 * 1e4))],
        sync_every=args.sync_every,
        controllers=controllers[args.controller],
        seed=args.seed,
        records=hdet.Records(records_path) if rank == 0 else None,
    )
    first_step = 0
    if args.resume:
        if not checkpoint_path.exists():
            raise SystemExit(f"--resume needs {checkpoint_path}, which is not there: start without --resume")
        state = torch.load(checkpoint_path, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        ensemble.load_state_dict(state["ensemble"])
        first_step = state["step"]

    def save(step: int) -> None:
        ensemble.converge()
        if rank == 0:
            state: dict[str, Any] = {
                "step": step,
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "ensemble": ensemble.state_dict(),
            }
            unfinished = checkpoint_path.with_suffix(".tmp")
            torch.save(state, unfinished)
            unfinished.replace(checkpoint_path)  # a crash leaves the old file or the new one

    # Each replica has its own stream of windows. A resumed run draws other windows than an unbroken one.
    stream = batches(train_text, args.batch, 64, seed=1_000_003 * args.seed + 1009 * first_step + rank)
    size = sum(p.numel() for p in model.parameters())
    console.print(f"{world_size} replicas, {size:,} parameters, {len(train_text):,} characters, {args.out}")
    step, start = first_step, time.monotonic()
    columns = [
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  lr {task.fields[lr]:.2e}"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console, disable=rank != 0 or not console.is_terminal) as progress:
        task = progress.add_task("", total=args.steps, completed=step, loss=math.nan, lr=math.nan)
        while step < args.steps:
            loss = loss_of(model, next(stream))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ensemble.step(loss)
            step += 1
            if step % 10 == 0:
                if rank == 0:
                    base = ensemble.base["lr"]
                    progress.update(task, completed=step, loss=loss.item(), lr=base)
                asked = stop_asked.clone()
                dist.all_reduce(asked)  # one replica's Ctrl-C stops all of them at the same step
                if asked.item():
                    break
            if step % args.sync_every == 0:
                save(step)
    save(step)
    seconds = time.monotonic() - start
    if step < args.steps:
        console.print(f"stopped at step {step} and saved; the same command with --resume goes on")
    else:
        bits = evaluate(model.module, held_out, 64)
        if rank == 0:
            show(console, hdet.read_records(records_path))
            result = {"bits_per_character": bits, "seconds": seconds}
            (args.out / "result.json").write_text(json.dumps(result) + "\n")
        console.print(f"{bits:.3f} bits per character on held-out files, {seconds:.0f} s")
        console.print(f"records: {records_path}", soft_wrap=True)
    dist.destroy_process_group()


def show(console: Console, records: list[hdet.RoundRecord]) -> None:
    """The closing table: one line per round."""
    table = Table(title="rounds")
    for name in ("step", "best loss", "worst loss", "signal", "correction", "base lr", "left out", "sync ms"):
        table.add_column(name, justify="right")
    for record in records:
        losses = [loss for loss in record.losses if loss is not None]
        signal = record.section(ComparingRecord).signal
        table.add_row(
            str(record.step),
            f"{min(losses):.4f}" if losses else "-",
            f"{max(losses):.4f}" if losses else "-",
            f"{signal['lr']:+.2f}" if signal else "-",
            f"{record.correction['lr']:.3f}",
            f"{record.base['lr']:.2e}",
            ", ".join(map(str, record.excluded)) or "-",
            f"{sum(record.milliseconds.values()):.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()

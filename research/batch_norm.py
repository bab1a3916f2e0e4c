"""What the statistics of BatchNorm should be at the end of a run with hdet.AutoLR, whose weights are a mean.

    python -m research.batch_norm --out research/records/batch_norm.json
    python -m research.batch_norm --table research/records/batch_norm.json

Small models with BatchNorm train with find_lr and AutoLR. Then the held-out loss is measured with the
statistics as the last step left them, with their mean over the tail, and with ``update_bn`` of torch, which
makes one more pass over the data.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

import hdet
from hdet.method.recipe import Recipe, tail_steps

__all__ = ["losses", "table"]

WAYS = ("as they are", "mean over the tail", "update_bn")
CASES = (("mlp", 6), ("mlp", 20), ("cnn", 8), ("cnn", 20))
"""Models, and how many epochs they train for."""

Problem = tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], Tensor, Tensor, int]


def _problem(name: str) -> Problem:
    """A model, its loss, inputs, targets, and how many of these are trained on."""
    if name == "mlp":
        x = torch.randn(3800, 8)
        model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
        return model, nn.functional.mse_loss, x, x.sin().sum(dim=1, keepdim=True), 1800
    pictures, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(pictures))
    x = torch.as_tensor(pictures, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))
    return model, nn.functional.cross_entropy, x, torch.as_tensor(classes)[order], 1200


def losses(name: str, num_epochs: int, seed: int) -> list[float]:
    """Held-out losses after one run, one for each of the ways."""
    torch.manual_seed(seed)
    model, criterion, x, y, num_train = _problem(name)
    loader = DataLoader(TensorDataset(x[:num_train], y[:num_train]), batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return criterion(model(batch[0]), batch[1])

    @torch.no_grad()
    def held_out(model: nn.Module) -> float:
        return loss_of(model.eval(), (x[num_train:], y[num_train:])).item()

    total_steps = num_epochs * len(loader)
    found = hdet.find_lr(model, optimizer, loader, loss_of, total_steps=total_steps)
    auto = hdet.AutoLR(optimizer, total_steps=total_steps, model=model, found=found)
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    tail, seen = tail_steps(total_steps, Recipe.average_tail), list[list[Tensor]]()
    for _ in range(num_epochs):
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if auto.num_steps + 1 in tail:
                seen.append([buffer.clone() for buffer in statistics])
            auto.step(loss)
    result = [held_out(model)]
    of_tail = copy.deepcopy(model)
    buffers = [buffer for buffer in of_tail.buffers() if buffer.is_floating_point()]
    for buffer, *values in zip(buffers, *seen, strict=True):
        buffer.copy_(torch.stack(values).mean(dim=0))
    result.append(held_out(of_tail))
    update_bn(loader, model)
    return [*result, held_out(model)]


def table(path: Path) -> str:
    """Losses with the statistics as they are, over those of the other ways."""
    runs = json.loads(path.read_text())["runs"]
    lines = [
        "| model | epochs | seeds | as is / mean over the tail | worst | as is / update_bn | worst |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, num_epochs in CASES:
        here = [run["losses"] for run in runs if run["key"][:2] == [name, num_epochs]]
        cells = []
        for way in (1, 2):
            ratios = [values[0] / values[way] for values in here]
            cells += [f"{median(ratios):.3f}", f"{max(ratios):.3f}"]
        lines.append(f"| {name} | {num_epochs} | {len(here)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/batch_norm.json"))
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--table", type=Path, help="print the table of a record, and do nothing else")
    args = parser.parse_args()
    if args.table is None:
        runs = [
            {"key": [*case, seed], "losses": [round(loss, 6) for loss in losses(*case, seed)]}
            for case in CASES
            for seed in range(args.seeds)
        ]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        command = f"python -m research.batch_norm --seeds {args.seeds}"
        args.out.write_text(json.dumps({"command": command, "ways": WAYS, "runs": runs}, indent=None) + "\n")
    print(table(args.table or args.out))


if __name__ == "__main__":
    main()

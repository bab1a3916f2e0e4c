"""The card of timm, with a model and an optimizer of timm on four kinds of small pictures.

timm needs torchvision. Where that is a build for another torch, its operators are missing and it does not
import, so the few that it asks for are declared here. Nothing that is trained uses them.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from tests.integrations.cards import snippet, task

_DECLARED = torch.library.Library("torchvision", "FRAGMENT")


def declare_operators() -> None:
    """What ``torchvision._meta_registrations`` registers must exist."""
    found = find_spec("torchvision")
    assert found is not None and found.origin is not None
    source = (Path(found.origin).parent / "_meta_registrations.py").read_text()
    for name in dict.fromkeys(re.findall(r'register_(?:meta|fake)\("(?:torchvision::)?(\w+)"', source)):
        if not hasattr(torch.ops.torchvision, name):
            _DECLARED.define(f"{name}(Tensor x) -> Tensor")


def main() -> None:
    declare_operators()
    import timm
    import timm.optim

    torch.manual_seed(0)
    kinds = torch.arange(120 * 8) % 4
    pictures = torch.randn(len(kinds), 1, 32, 32)
    for i in range(4):
        pictures[kinds == i, :, 8 * i : 8 * i + 8] += 1
    loader = list(zip(pictures.split(8), kinds.split(8), strict=True))
    names = task() | {"timm": timm, "loader": loader, "total_steps": len(loader)}
    names["loss_of"] = lambda model, batch: cross_entropy(model(batch[0]), batch[1])
    exec(snippet("timm"), names)
    model, optimizer, auto = names["model"], names["optimizer"], names["auto"]
    losses = []
    for batch in loader:
        loss = names["loss_of"](model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)
        losses.append(loss.item())
    print(names["found"])
    assert len(optimizer.param_groups) == 2 and auto.num_steps == len(loader)
    assert names["found"].lr[0] > 1e-4 and sum(losses[-10:]) < 0.7 * sum(losses[:10]), losses


if __name__ == "__main__":
    main()

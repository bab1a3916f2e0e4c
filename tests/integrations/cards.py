"""The snippets of docs/integrations.md, and the small task that every one of them is given."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hdet
from tests.integrations.launch import ROOT

NUM_BATCHES, BATCH, EPOCHS = 30, 16, 2
TOTAL_STEPS = NUM_BATCHES * EPOCHS
PAGE = ROOT / "docs/integrations.md"


def snippet(name: str) -> str:
    """The code of a card. A test that needs only a part of it can change it before it is run."""
    return dict(re.findall(r"<!-- run with (\w+) -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL))[
        name
    ]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)


def data() -> TensorDataset:
    x = torch.randn(NUM_BATCHES * BATCH, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def loader(batch_size: int = BATCH) -> DataLoader[Any]:
    return DataLoader(data(), batch_size)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


def task() -> dict[str, Any]:
    """What the snippets call their own."""
    model = net()
    return {
        "hdet": hdet,
        "torch": torch,
        "model": model,
        "optimizer": adamw(model),
        "loader": loader(),
        "loss_of": loss_of,
        "total_steps": TOTAL_STEPS,
        "epochs": EPOCHS,
        "num_ranks": 1,
    }


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters() if p.requires_grad]


def plain_loop(names: dict[str, Any]) -> hdet.FoundLR:
    """What every framework is expected to do. It is the card of Keras too."""
    exec(snippet("keras"), names)
    return names["found"]

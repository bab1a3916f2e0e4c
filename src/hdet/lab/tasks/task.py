"""Task: a problem to train on, built in or your own."""

from __future__ import annotations

import abc
import importlib
import importlib.util
import inspect
import json
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hdet.errors import install_command
from hdet.method.fan_out import derived_seed

BUILT_IN_TASKS = {
    "feed": "hdet.lab.tasks.feed:Feed",
    "charlm": "hdet.lab.tasks.charlm:CharLM",
    "digits": "hdet.lab.tasks.digits:Digits",
    "quadratic": "hdet.lab.tasks.quadratic:Quadratic",
}


class Task(abc.ABC):
    """A problem to train on. Derive from it, and name it on the command line as ``path/to/file.py:MyTask``.

    A task is made without arguments, or with options (``--option name=value``), which are the arguments of
    its constructor. Everything random in it follows from the seeds that it is given.

    >>> class Line(Task):
    ...     def build_model(self, seed):
    ...         return nn.Linear(1, 1)
    ...     def train_batches(self, *, seed, replica=0, start=0):
    ...         for step in itertools.count(start):
    ...             yield torch.randn(8, 1, generator=batch_generator(seed, replica, step))
    ...     def evaluation_batches(self):
    ...         return [torch.linspace(-1, 1, 32).unsqueeze(1)]
    ...     def loss(self, model, batch):
    ...         return (model(batch) - 2 * batch).square().mean()
    >>> import itertools
    >>> sorted(Line().metrics(Line().build_model(0), Line().evaluation_batches()))
    ['loss']
    """

    learning_rate: float = 1e-3
    """Peak learning rate of ``hdet run`` where none is given; a reasonable one, not the best."""
    num_steps: int = 1000
    """Length of ``hdet run`` where none is given."""
    num_examples: int | None = None
    """Size of a training set that repeats; None for a stream that never does."""
    batch_size: int = 0
    """Examples per replica and step, 0 if that has no meaning."""
    can_vectorize: bool = True
    """All virtual replicas run at once (``torch.func.vmap``); False runs them one by one."""
    loss_unit: str = "loss"
    """Names the loss, for axes and tables."""
    metric_notes: Mapping[str, str] = MappingProxyType({})
    """Tells in a few words what a metric is, by its name, for the report."""

    @abc.abstractmethod
    def build_model(self, seed: int) -> nn.Module:
        """A new model; the same weights for the same seed."""

    @abc.abstractmethod
    def train_batches(self, *, seed: int, replica: int = 0, start: int = 0) -> Iterator[Any]:
        """An endless stream of batches for one replica, beginning with the one of step ``start``.

        Batches are tensors, or tuples, lists and dictionaries of them, always of the same shapes.
        """

    @abc.abstractmethod
    def evaluation_batches(self) -> Iterable[Any]:
        """Held-out batches, the same ones every time."""

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of one batch: its mean, a tensor with one element."""

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Parameter groups, each with a ``name``; one with everything unless you say otherwise."""
        return [{"name": "all", "params": list(model.parameters())}]

    def probe_batch(self) -> Any:
        """The batch that replicas are compared on; the first evaluation batch unless you say otherwise.

        It steers the run: take one that :meth:`evaluation_batches` does not have if you can.
        """
        return next(iter(self.evaluation_batches()))

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Measure what the model is worth: ``"loss"``, the mean over the batches, and anything else."""
        return {"loss": mean([_number(self.loss(model, batch)) for batch in batches])}


def _number(loss: object) -> float:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.item()
    got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
    raise ValueError(f"loss of a task must return a tensor with one element, got {got}: return its mean")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for the length of the block, and each module back after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def mean(values: Iterable[float]) -> float:
    """Take the arithmetic mean; NaN of nothing."""
    numbers = list(values)
    return fmean(numbers) if numbers else math.nan


def batch_generator(seed: int, replica: int, step: int) -> torch.Generator:
    """Make a private generator for one batch: streams can begin at any step, and no two are alike.

    >>> a, b = (torch.rand(1, generator=batch_generator(0, 1, 7)) for _ in range(2))
    >>> torch.equal(a, b)
    True
    """
    return torch.Generator().manual_seed(derived_seed(seed, "batch", replica, step))


def epoch_orders(size: int, seed: int, stream: str, replica: int) -> Callable[[int], Tensor]:
    """Make a function that gives the order of a set's examples in an epoch, another one for every replica."""

    @lru_cache(maxsize=2)  # a batch may end one epoch and begin the next
    def order(epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(derived_seed(seed, stream, replica, epoch))
        return torch.randperm(size, generator=generator)

    return order


def load_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Load the task of this name: a built-in one, ``path/to/file.py:MyTask`` or ``package.module:MyTask``."""
    target = BUILT_IN_TASKS.get(name, name)
    if ":" not in target:
        raise ValueError(
            f"task must be one of {', '.join(BUILT_IN_TASKS)} or path/to/file.py:MyTask, got {name!r}"
        )
    where, _, attribute = target.rpartition(":")
    if where.endswith(".py") and not Path(where).is_file():
        raise ValueError(f"task must name a file that exists, got {where!r}: there is no such file")
    with _named_errors(name, "cannot be imported"):
        module = _module_of_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    kind = getattr(module, attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise ValueError(
            f"task must name a class derived from hdet.lab.tasks.Task, got {name!r}: "
            f"{where} has {'no ' + attribute if kind is None else repr(kind)}"
        )
    return _construct(kind, name, dict(options or {}))


@contextmanager
def _named_errors(name: str, what: str) -> Iterator[None]:
    """Turn any error of the user's own code into one that names the task, the file and the line."""
    try:
        yield
    except Exception as error:
        if name in BUILT_IN_TASKS and not isinstance(error, ModuleNotFoundError):
            raise
        if isinstance(error, ModuleNotFoundError) and error.name == "sklearn":
            raise ValueError(f"task {name!r} needs scikit-learn: {install_command('cli')}") from error
        if isinstance(error, SyntaxError):
            where, words = f"{error.filename}, line {error.lineno}: ", error.msg
        else:  # the last line of the user's own code, if any was reached
            places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
            own = [f for f in places if not f[0].startswith(("<", __file__)) and "site-packages" not in f[0]]
            where, words = (f"{own[-1][0]}, line {own[-1][1]}: " if own else ""), str(error)
        raise ValueError(f"task {name!r} {what}: {where}{type(error).__name__}: {words}") from error


def _module_of_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"hdet_task_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _construct(kind: type[Task], name: str, options: dict[str, Any]) -> Task:
    known = list(inspect.signature(kind).parameters)
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(
            f"option {unknown[0]!r} is not known to task {name!r}: it takes {', '.join(known) or 'none'}"
        )
    if missing := [method for method in vars(Task) if method in kind.__abstractmethods__]:
        raise ValueError(f"task {name!r} must define {', '.join(missing)}")
    with _named_errors(name, "cannot be built"):
        return kind(**options)


def parse_options(texts: Iterable[str], flag: str = "--option") -> dict[str, Any]:
    """Read options of the command line, ``name=value``; values are JSON where they can be.

    Args:
        texts: what was given.
        flag: for the error.

    >>> parse_options(["width=32", "model=conv", "dropout=.5", "name=inf"])
    {'width': 32, 'model': 'conv', 'dropout': 0.5, 'name': 'inf'}
    """
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name):
            raise ValueError(f"{flag} must be NAME=VALUE, got {text!r}")
        options[name] = _value_of(value)
    return options


def _value_of(text: str) -> Any:
    if re.fullmatch(r"[+-]?(\d+\.|\.\d+)(e[+-]?\d+)?", text, re.ASCII | re.IGNORECASE):
        return float(text)  # JSON has no number like .5 or 1.
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text

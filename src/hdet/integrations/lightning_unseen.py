"""Call ``training_step`` of a Lightning module so that nothing sees it: in trials, and on held-out data."""

from __future__ import annotations

import importlib
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hdet.replicas.probe import Probe

_NOT_THE_FIRST = 1
"""``batch_idx`` in a trial. Some modules do more at the first batch, or at every hundredth."""
_HELD_BY_TORCH = {"_parameters", "_buffers", "_modules"}


class UnseenProbe(Probe):
    """Scores a Lightning module by its own loss on held-out batches, while its trainer fits it.

    Args:
        module: whose trainer is at work.
        batches: as its loaders give them.
    """

    def __init__(self, module: Any, batches: Iterable[Any]) -> None:
        with unseen(module):
            super().__init__((made_ready(module, batch) for batch in batches), training_loss)

    def __call__(self, model: nn.Module, *, only_first: bool = False) -> Tensor:
        """Give the losses of its parts."""
        with unseen(model):
            return super().__call__(model, only_first=only_first)

    def mean(self, model: nn.Module) -> Tensor:
        """Give the mean loss over all its examples."""
        with unseen(model):
            return super().mean(model)


def made_ready(module: Any, batch: Any) -> Any:
    """Return a batch of a loader as ``training_step`` gets it: converted, and on the device."""
    trainer = module.trainer
    ready = module._on_before_batch_transfer(  # noqa: SLF001
        trainer.precision_plugin.convert_input(batch), dataloader_idx=0
    )
    return trainer.strategy.batch_to_device(ready, dataloader_idx=0)


def training_loss(module: Any, batch: Any) -> Tensor:
    """Compute the loss of a batch that is ready, with the trainer's precision."""
    trainer = module.trainer
    build = trainer.fit_loop.epoch_loop._build_kwargs  # noqa: SLF001
    arguments = build(OrderedDict(), batch, _NOT_THE_FIRST)
    with trainer.precision_plugin.train_step_context():
        loss = loss_in(module.training_step(*arguments.values()))
    # None leaves the batch out. So does find_lr with a loss that is not finite.
    return torch.tensor(math.nan, requires_grad=True) if loss is None else loss


def loss_in(output: Any) -> Tensor | None:
    """Find the loss in what training_step returned: the loss, a mapping that holds it, or None."""
    return output.get("loss") if isinstance(output, Mapping) else output


@contextmanager
def unseen(module: Any) -> Iterator[None]:
    """Within the block, random numbers, attributes and logs do not change for good, and nothing is logged."""
    with ExitStack() as stack:
        stack.enter_context(importlib.import_module("lightning.pytorch.utilities.seed").isolate_rng())
        stack.enter_context(attributes_put_back(module))
        _silence(module.trainer, module, stack)
        yield


def _silence(trainer: Any, module: Any, stack: ExitStack) -> None:
    """Until the stack is closed, nothing is logged. The module's own attributes are put back by others."""
    dummy = importlib.import_module("lightning.pytorch.loggers.logger").DummyLogger
    for name in ("loggers", "should_stop"):
        stack.callback(setattr, trainer, name, getattr(trainer, name))
    trainer.loggers = [dummy() for _ in trainer.loggers]
    for name in ("log", "log_dict"):
        vars(module)[name] = lambda *_, **__: None


@contextmanager
def attributes_put_back(model: nn.Module) -> Iterator[None]:
    """Put the plain attributes of all modules back, after the block.

    Numbers, tensors, and the lists, dicts and sets that are attributes themselves. Metrics of torchmetrics
    are modules that keep their state in these. Other objects stay, with whatever has changed in them.

    >>> model = nn.Linear(2, 1)
    >>> model.losses, model.num_calls = [1.0], 1
    >>> with attributes_put_back(model):
    ...     model.losses.append(2.0)
    ...     model.num_calls, model.is_new = 2, True
    >>> model.losses, model.num_calls, hasattr(model, "is_new")
    ([1.0], 1, False)
    """
    saved = [
        (vars(module), {name: (value, _copy(value)) for name, value in vars(module).items()})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for held, attributes in saved:
            for name in held.keys() - attributes.keys():
                del held[name]
            for name, (value, content) in attributes.items():
                if name not in _HELD_BY_TORCH:
                    _put_back(value, content)
                    held[name] = value


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):  # one of inference mode cannot be changed outside of it
        return None if value.is_inference() else value.detach().clone()
    return value.copy() if isinstance(value, list | dict | set | deque) else None


@torch.no_grad()
def _put_back(value: Any, content: Any) -> None:
    if isinstance(content, Tensor):
        value.copy_(content)
    elif content is not None:
        value.clear()
        (value.extend if isinstance(value, list | deque) else value.update)(content)

"""Losses of a round, summed where they are, without waiting for the device; and the score on a probe."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hdet.checks import shown
from hdet.errors import bad_argument
from hdet.replicas.tensors import widest_float

_EXAMPLE = "write def loss(model, batch): return cross_entropy(model(batch[0]), batch[1])"
_LONGEST_REASON = 200
"""Characters that are shown of an error in the user's loss."""


def scalar_of(must: str, value: object) -> Tensor:
    """``value`` without dimensions, if it is a real tensor with one element; ``must`` begins the error.

    >>> scalar_of("loss must be", torch.ones(2))
    Traceback (most recent call last):
    ValueError: loss must be a tensor with one element, got shape (2,): take its mean
    """
    if not isinstance(value, Tensor):
        remedy = "leave out .item()" if isinstance(value, float) else "give the loss alone"
        raise TypeError(f"{must} a tensor with one element, got {shown(value)}: {remedy}")
    if not value.is_floating_point():
        take_real = "take its real part or its absolute value"
        remedy = take_real if value.is_complex() else "a loss is no whole number"
        raise TypeError(f"{must} a tensor with one element, got {value.dtype}: {remedy}")
    if value.dim() and value.numel() != 1:
        raise ValueError(f"{must} a tensor with one element, got shape {tuple(value.shape)}: take its mean")
    return value.reshape(()) if value.dim() else value


def first_loss(loss: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any, remedy: str = "") -> Any:
    """Call the user's loss for the first time. An error then says how it was called.

    One of torch, such as of shapes that do not fit or of memory, stays what it is and gets a note. With a
    remedy it is explained, too.

    >>> first_loss(lambda batch, model: model(batch), nn.Identity(), 3)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: loss must be a function loss(model, batch), with the model first, but it failed on the ...
    """
    try:
        return loss(model, batch)
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not (remedy and type(error) is RuntimeError):
            if sys.version_info >= (3, 11):
                error.add_note(f"hdet called loss(model, batch), with the model first and {shown(batch)}")
            raise
        if "more than 1 value per channel" in str(error):
            remedy = "use a larger batch_size, and drop_last=True"
            raise bad_argument(
                "batches", "must hold 2 examples or more for BatchNorm", "1", remedy
            ) from error
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:_LONGEST_REASON]
        kind = next((k for k in (TypeError, RuntimeError) if isinstance(error, k)), ValueError)
        raise kind(
            "loss must be a function loss(model, batch), with the model first, but it failed on the first "
            f"batch, {shown(batch)} ({reason}): {remedy or _EXAMPLE}"
        ) from error


def number_of(must: str, value: object) -> float:
    """``value`` as a float, if it is a real tensor with one element or a number; ``must`` begins the error.

    >>> number_of("probe must return", "0.5")
    Traceback (most recent call last):
    TypeError: probe must return a tensor with one element or a number, got '0.5' of type str
    """
    if isinstance(value, Tensor):
        is_whole = not (value.is_floating_point() or value.is_complex())  # a score may be a number of errors
        return scalar_of(must, value.double() if is_whole else value).item()
    try:
        if isinstance(value, str):  # float() would read it
            raise TypeError
        return float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        raise TypeError(f"{must} a tensor with one element or a number, got {shown(value)}") from None


class LossSum(NamedTuple):
    """The finite losses that were seen, and how many were not."""

    total: float = 0.0
    num_finite: float = 0.0
    num_nonfinite: float = 0.0

    def plus(self, other: LossSum) -> LossSum:
        """Both together."""
        return LossSum(*map(add, self, other))


NOTHING = LossSum()


class DeviceSum:
    """Losses of one device: written to slots, folded into three sums when all slots are full.

    One small copy per loss is all that happens between syncs. Keeping a reference instead would be
    wrong where the loss tensor is reused, as in a captured graph.

    Args:
        device: of the losses.
        num_slots: losses that are summed together: each operation costs more than its arithmetic.
        shape: of a loss; an element for each replica where there are several here.

    >>> losses = DeviceSum(torch.device("cpu"), shape=(2,))
    >>> losses.add(torch.tensor([1.0, float("nan")])); losses.add(torch.tensor([3.0, 4.0]))
    >>> losses.take()
    [[4.0, 4.0], [2.0, 1.0], [0.0, 1.0]]
    """

    def __init__(self, device: torch.device, num_slots: int = 256, shape: tuple[int, ...] = ()) -> None:
        dtype = widest_float(device)
        self.device = device
        self._losses = torch.zeros(num_slots, *shape, dtype=dtype, device=device)
        self._slots = list(self._losses)
        self._sums = torch.zeros(3, *shape, dtype=dtype, device=device)
        self.clear()

    def add(self, loss: Tensor) -> None:
        """Take one loss."""
        self._slots[self._used].copy_(loss.detach())
        self._used += 1
        if self._used == len(self._slots):
            self._fold()

    def take(self) -> Any:
        """The sums since the last call: of finite losses, and how many were finite and were not.

        Waits for the device.
        """
        if not self._is_folded and self._losses.dim() == 1:
            total, count = self._losses[: self._used].sum(dim=0).item(), float(self._used)
            if math.isfinite(total):  # then so is each: nothing need be left out
                self._used = 0
                return [total, count, 0.0]
        self._fold()
        sums = self._sums.tolist()
        self.clear()
        return sums

    def clear(self) -> None:
        """Forget what was seen."""
        self._used = 0
        self._is_folded = False
        self._sums.zero_()

    def _fold(self) -> None:
        losses = self._losses[: self._used]
        finite = torch.isfinite(losses)
        self._sums[0] += torch.where(finite, losses, 0.0).sum(dim=0)
        num_finite = finite.sum(dim=0)
        self._sums[1] += num_finite
        self._sums[2] += self._used - num_finite
        self._used = 0
        self._is_folded = True


class LossMeter:
    """Collects losses given as tensors on any device, or as numbers.

    >>> meter = LossMeter()
    >>> meter.add(torch.tensor(2.0)); meter.add(4.0); meter.add(float("nan"))
    >>> meter.take()
    LossSum(total=6.0, num_finite=2.0, num_nonfinite=1.0)
    """

    def __init__(self) -> None:
        self._devices: dict[torch.device, DeviceSum] = {}
        self._total = self._num_finite = self._num_nonfinite = 0.0

    def add(self, loss: Tensor | float) -> None:
        """Take one loss. The tensor is read now and may be changed afterwards."""
        if isinstance(loss, Tensor):
            if loss.dim() or not loss.is_floating_point():
                loss = scalar_of("loss must be", loss)
            if not loss.is_cpu or type(loss) is not Tensor:
                device = loss.device
                if device not in self._devices:
                    self._devices[device] = DeviceSum(device)
                self._devices[device].add(loss)
                return
            number = loss.item()  # there is no device to wait for
        elif isinstance(loss, int):
            raise TypeError(
                f"loss must be a tensor with one element or a float, got the integer {loss!r}: step() takes "
                "the loss, not the number of a step or an epoch"
            )
        else:
            number = number_of("loss must be", loss)
        if math.isfinite(number):
            self._total += number
            self._num_finite += 1
        else:
            self._num_nonfinite += 1

    def take(self) -> LossSum:
        """Return what was seen since the last call; waits for the device."""
        taken = LossSum(self._total, self._num_finite, self._num_nonfinite)
        self._total = self._num_finite = self._num_nonfinite = 0.0
        for device_sum in self._devices.values():
            taken = taken.plus(LossSum(*device_sum.take()))
        return taken


@contextmanager
def evaluating(model: nn.Module | None) -> Iterator[None]:
    """Within the block gradients are off and the model is in evaluation mode.

    Module modes are put back afterwards, also on an error.

    >>> layer = nn.Dropout(0.5)
    >>> with evaluating(layer):
    ...     layer(torch.ones(4)).sum()      # dropout is off
    tensor(4.)
    >>> layer.training
    True
    """
    modes = [] if model is None else [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode

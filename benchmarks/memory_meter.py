"""MemoryMeter: the bytes of the tensors that hdet makes, by part, counted one by one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hdet
from hdet.replicas import copies
from hdet.replicas.average import Averager
from hdet.replicas.tail import Tail
from hdet.steering.guard import GuardSteering

_SAVERS = (Tail.hold_whole, Tail.state_dict, GuardSteering.before_save, GuardSteering.state_dict)
_SAVING = {f.__code__ for f in _SAVERS}
_GATHER = {copies._gather_into.__code__}  # noqa: SLF001
_OWNERS = {
    Tail.__module__: "tail",
    GuardSteering.__module__: "guard",
    hdet.find_lr.__module__: "search",
}
"""Whose memory it is that code of a module takes, the first of these that has a part in a call."""


class MemoryMeter(TorchDispatchMode):
    """Counts the memory that hdet takes beside that of the training, and its peak.

    A tensor belongs to the innermost code that made it. What the model, the optimizer and autograd make is
    the training's, also where hdet has called them in a trial. Memory that a backend takes for itself while a
    message travels is not seen.

    >>> with MemoryMeter() as meter:
    ...     _ = torch.zeros(100)  # not hdet's
    >>> meter.peak_bytes
    0
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, str, int]] = {}
        self.peak_bytes = 0
        """The most at any time, of all parts together but for saving."""
        self.peak_while_saving = 0
        """The most at any time."""
        self.at_peak: Mapping[str, int] = {}
        """How the peak divides into parts."""
        self.peak_of: dict[str, int] = {}
        """The most that each part took at its own time."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        part = _part_of(sys._getframe(1))  # noqa: SLF001
        if part is None:
            return func(*args, **(kwargs or {}))
        given = {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and _address(tensor) not in given:
                self._count(tensor, part)
        return made

    def _count(self, tensor: Tensor, part: str) -> None:
        storage = tensor.untyped_storage()
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self._live[_address(tensor)] = (StorageWeakRef(storage), part, storage.nbytes())
        now = self.bytes_by_part()
        for name, size in now.items():
            self.peak_of[name] = max(size, self.peak_of.get(name, 0))
        self.peak_while_saving = max(self.peak_while_saving, sum(now.values()))
        now.pop("saving", None)
        if sum(now.values()) > self.peak_bytes:
            self.peak_bytes, self.at_peak = sum(now.values()), now

    def bytes_by_part(self) -> dict[str, int]:
        """What is held now."""
        now: dict[str, int] = {}
        for reference, part, size in self._live.values():
            if not reference.expired():
                now[part] = now.get(part, 0) + size
        return now


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # noqa: SLF001


def _part_of(frame: FrameType | None) -> str | None:
    """The part that a new tensor belongs to; None for the training."""
    codes, modules = set[CodeType](), set[str]()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if package == "hdet":
            codes.add(frame.f_code)
            modules.add(module)
        elif not codes:
            is_training = module.startswith(("torch.autograd", "torch.nn", "torch.optim"))
            is_neutral = package in ("torch", "copy") or frame.f_code.co_filename.startswith("<")
            if is_training or not is_neutral:
                return None
        frame = frame.f_back
    if not codes:
        return None
    if codes & _SAVING:
        return "saving"
    if codes & _GATHER or Averager.__module__ in modules:
        return "bucket"
    return next((part for module, part in _OWNERS.items() if module in modules), "other")

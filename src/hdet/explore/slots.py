"""Slots: the places where a hyperparameter's value lives.

A slot keeps the *scheduled* value (what the wrapped schedule last wrote, or what the user had set) apart from
what it puts in its place. So a schedule that computes its next value from the current one never sees a
replica's multiplier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Bounds = tuple[float, float] | None


class _Slot:
    """Base of all slots: what they are told to hold, and a trace of scheduled values."""

    group_index = -1
    """Of the optimizer's group that holds it, if one does."""
    column = ""
    """The name of the value there."""
    is_complement = False
    """Factors apply to one minus the value, as suits a momentum close to one."""
    is_static = False
    """Nobody else writes it at every step, so it is enough to write it at syncs."""
    factor = 1.0
    held: float | None = None

    def __init__(self) -> None:
        self.trace: list[Any] = []

    def take_trace(self, *, keep_newest: bool) -> list[float]:
        """Return the scheduled values since the last call."""
        kept = len(self.trace) - (keep_newest and bool(self.trace))
        taken, self.trace = self.trace[:kept], self.trace[kept:]
        return taken

    def scale_trace(self, factor: float) -> None:
        """Make up for another correction, with which the scheduled values that wait were used."""
        self.trace = [value * factor for value in self.trace]


class _GroupSlot(_Slot):
    def __init__(self, optimizer: Optimizer, group_index: int, key: str, bounds: Bounds = None) -> None:
        super().__init__()
        self.group_index = group_index
        self.column = key
        self._optimizer = optimizer
        self._bounds = bounds
        self.bind()

    def bind(self) -> None:
        """Find the place again: loading an optimizer replaces its groups. What it holds is scheduled."""
        raise NotImplementedError


class FloatSlot(_GroupSlot):
    """A float in a parameter group."""

    def bind(self) -> None:
        """See :meth:`_GroupSlot.bind`."""
        self.group = self._optimizer.param_groups[self.group_index]
        self.scheduled = self.group[self.column]
        self.last_put = self.scheduled

    def put_scheduled_into(self, optimizer_state: dict[str, Any]) -> None:
        """Put the scheduled value where a saved optimizer holds this slot."""
        optimizer_state["param_groups"][self.group_index][self.column] = self.scheduled


class TensorSlot(_GroupSlot):
    """A one-element tensor in a parameter group, written in place and without a host sync.

    Compiled and graph-captured optimizers read the tensor itself: replacing it would have no effect.
    """

    @property
    def scheduled(self) -> float:
        """The scheduled value. Reading it waits for the device."""
        return self._scheduled.item()

    @scheduled.setter
    def scheduled(self, value: float) -> None:
        self._scheduled.fill_(value)

    def bind(self) -> None:
        """See :meth:`_GroupSlot.bind`."""
        groups = self._optimizer.param_groups
        tensor: Tensor = groups[self.group_index][self.column]
        if any(groups[i][self.column] is tensor for i in range(self.group_index)):
            # torch gives one tensor to all groups; here each must have its own.
            tensor = groups[self.group_index][self.column] = tensor.detach().clone()
        self._tensor = tensor
        self._scheduled = tensor.detach().clone()
        self._last_put = tensor.detach().clone()

    def put_scheduled(self, *, compare: bool) -> bool:
        """Put the scheduled value in place; with ``compare``, not where somebody else has written: tell."""
        if compare and not torch.equal(self._tensor, self._last_put):
            return True
        self._tensor.copy_(self._scheduled)
        self._last_put.copy_(self._scheduled)
        return False

    def put_value(self, *, is_traced: bool) -> None:
        """Take what is in place as the scheduled value and put the replica's value instead."""
        self._scheduled.copy_(self._tensor)
        if is_traced:
            self.trace.append(self._scheduled.clone())
        if self.held is None:
            self._tensor.mul_(self.factor)
        else:
            self._tensor.fill_(self.held)
        if self._bounds is not None:
            self._tensor.clamp_(*self._bounds)
        self._last_put.copy_(self._tensor)

    def take_trace(self, *, keep_newest: bool) -> list[float]:
        """See :meth:`_Slot.take_trace`."""
        taken: list[Any] = super().take_trace(keep_newest=keep_newest)
        return torch.stack(taken).reshape(-1).tolist() if taken else []

    def put_scheduled_into(self, optimizer_state: dict[str, Any]) -> None:
        """See :meth:`FloatSlot.put_scheduled_into`."""
        optimizer_state["param_groups"][self.group_index][self.column] = self._scheduled.clone()


@dataclass(eq=False)
class FunctionSlot(_Slot):
    """Any place that can be read and written through functions."""

    get: Callable[[], float]
    """Reads the value."""
    set: Callable[[float], None]
    """Writes it."""
    is_complement: bool = False
    save: Callable[[dict[str, Any], float], None] | None = None
    """Puts a value where a saved optimizer holds this slot; None for a place outside the optimizer, which is
    static."""
    group_index: int = -1
    column: str = ""
    bounds: Bounds = None
    """The values that are put stay between them, also while the schedule moves."""

    def __post_init__(self) -> None:
        super().__init__()
        self.is_static = self.save is None
        self.scheduled = self.get()
        self._last_put = self.scheduled

    def bind(self) -> None:
        """See :meth:`_GroupSlot.bind`; loading an optimizer does not touch what lies outside it."""
        if self.is_static:
            self.put_scheduled()
        else:
            self.scheduled = self.get()
            self._last_put = self.scheduled

    def put_scheduled(self, *, compare: bool = True) -> bool:
        """Put the scheduled value in place, unless somebody else has written there; tell whether."""
        if self.get() != self._last_put:
            return True
        self.set(self.scheduled)
        self._last_put = self.get()
        return False

    def put_value(self, *, is_traced: bool) -> None:
        """Take what is in place as the scheduled value and put the replica's value instead."""
        self.scheduled = self.get()
        if is_traced and not self.is_static:
            self.trace.append(self.scheduled)
        if self.held is not None:
            value = self.held
        elif self.is_complement:
            value = 1 - (1 - self.scheduled) * self.factor
        else:
            value = self.scheduled * self.factor
        if self.bounds is not None:
            value = min(max(value, self.bounds[0]), self.bounds[1])
        self.set(value)
        self._last_put = self.get()  # what is read back may be rounded

    def take_trace(self, *, keep_newest: bool) -> list[float]:
        """See :meth:`_Slot.take_trace`; a static value stands for all steps."""
        return [self.scheduled] if self.is_static else super().take_trace(keep_newest=keep_newest)

    def put_scheduled_into(self, optimizer_state: dict[str, Any]) -> None:
        """See :meth:`FloatSlot.put_scheduled_into`."""
        if self.save is not None:
            self.save(optimizer_state, self.scheduled)


Slot = FloatSlot | TensorSlot | FunctionSlot


class SlotWriter:
    """Slots that are written together.

    This is the only part of the library that runs for every group at every step. Its loops over float
    slots are written out, because a method call per slot would cost as much as the schedule itself.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._floats = [slot for slot in slots if isinstance(slot, FloatSlot)]
        self._others = [slot for slot in slots if not isinstance(slot, FloatSlot)]

    def put_scheduled(self, *, compare_tensors: bool = False) -> bool:
        """Put every scheduled value in place; tell whether somebody else had written to a slot.

        What somebody else wrote stays, as the scheduled value. Comparing tensors waits for the device.
        """
        changed_outside = False
        for slot in self._floats:
            group, key = slot.group, slot.column
            if group[key] == slot.last_put:
                group[key] = slot.scheduled
            else:
                changed_outside = True
        for slot in self._others:
            changed_outside |= slot.put_scheduled(compare=compare_tensors)
        return changed_outside

    def put_values(self, *, is_traced: bool = False) -> None:
        """Take what is in place as scheduled values and put this replica's values instead."""
        for slot in self._floats:
            group, key, held = slot.group, slot.column, slot.held
            slot.scheduled = scheduled = group[key]
            group[key] = slot.last_put = scheduled * slot.factor if held is None else held
        for slot in self._others:
            slot.put_value(is_traced=is_traced)
        if is_traced:
            for slot in self._floats:
                slot.trace.append(slot.scheduled)

"""Slots: the places where a hyperparameter's value lives.

A slot keeps the *scheduled* value (what the wrapped schedule last wrote, or what the user had set) apart from
what it puts in its place. So a schedule that computes its next value from the current one never sees a
replica's multiplier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class _Slot:
    """What all slots have: where they lie, what they are told to hold, and a trace of scheduled values."""

    is_complement = False
    """Factors apply to one minus the value, as suits a momentum close to one."""
    is_static = False
    """Nobody else writes it at every step, so it is enough to write it at syncs."""

    def __init__(self, group_index: int, column: str) -> None:
        self.group_index, self.column = group_index, column
        self.factor = 1.0
        self.held: float | None = None
        self.trace: list[Any] = []

    def take_trace(self, *, keep_newest: bool) -> list[float]:
        """The scheduled values since the last call."""
        kept = len(self.trace) - (keep_newest and bool(self.trace))
        taken, self.trace = self.trace[:kept], self.trace[kept:]
        return taken

    def scale_trace(self, factor: float) -> None:
        """The scheduled values that wait were used with another correction: make up for it."""
        self.trace = [value * factor for value in self.trace]


class FloatSlot(_Slot):
    """A float in a parameter group."""

    def __init__(self, optimizer: Optimizer, group_index: int, key: str) -> None:
        super().__init__(group_index, key)
        self._optimizer, self.key = optimizer, key
        self.bind()

    def bind(self) -> None:
        """Find the place again: loading an optimizer replaces its groups. What it holds is scheduled."""
        self.group = self._optimizer.param_groups[self.group_index]
        self.scheduled = self.last_put = self.group[self.key]

    def put_scheduled_into(self, optimizer_state: dict[str, Any]) -> None:
        """Put the scheduled value where a saved optimizer holds this slot."""
        optimizer_state["param_groups"][self.group_index][self.key] = self.scheduled


class TensorSlot(_Slot):
    """A one-element tensor in a parameter group, written in place and without a host sync.

    Compiled and graph-captured optimizers read the tensor itself: replacing it would have no effect.
    """

    def __init__(
        self, optimizer: Optimizer, group_index: int, key: str, bounds: tuple[float, float] | None = None
    ) -> None:
        super().__init__(group_index, key)
        self._optimizer, self.key, self._bounds = optimizer, key, bounds
        self.bind()

    @property
    def scheduled(self) -> float:
        """The scheduled value. Reading it waits for the device."""
        return self._scheduled.item()

    @scheduled.setter
    def scheduled(self, value: float) -> None:
        self._scheduled.fill_(value)

    def bind(self) -> None:
        """See :meth:`FloatSlot.bind`."""
        groups = self._optimizer.param_groups
        tensor: Tensor = groups[self.group_index][self.key]
        if any(groups[i][self.key] is tensor for i in range(self.group_index)):
            # torch gives one tensor to all groups; here each must have its own.
            tensor = groups[self.group_index][self.key] = tensor.detach().clone()
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
        optimizer_state["param_groups"][self.group_index][self.key] = self._scheduled.clone()


class FunctionSlot(_Slot):
    """Any place that can be read and written through functions.

    Args:
        get: reads the value.
        set: writes it.
        is_complement: factors apply to one minus the value, as suits a momentum close to one.
        save: puts a value where a saved optimizer holds this slot; None for a place outside the optimizer,
            which is static.
        group_index: of the optimizer's group that holds it, if one does.
        column: what the value is called there.
        bounds: what is put stays between them, also while the schedule moves.
    """

    def __init__(
        self,
        get: Callable[[], float],
        set: Callable[[float], None],
        *,
        is_complement: bool = False,
        save: Callable[[dict[str, Any], float], None] | None = None,
        group_index: int = -1,
        column: str = "",
        bounds: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(group_index, column)
        self._get, self._set, self._save, self._bounds = get, set, save, bounds
        self.is_complement, self.is_static = is_complement, save is None
        self.scheduled = self._last_put = get()

    def bind(self) -> None:
        """See :meth:`FloatSlot.bind`; loading an optimizer does not touch what lies outside it."""
        if self._save is not None:
            self.scheduled = self._last_put = self._get()
        else:
            self.put_scheduled()

    def put_scheduled(self, *, compare: bool = True) -> bool:
        """Put the scheduled value in place, unless somebody else has written there; tell whether."""
        if self._get() != self._last_put:
            return True
        self._set(self.scheduled)
        self._last_put = self._get()
        return False

    def put_value(self, *, is_traced: bool) -> None:
        """Take what is in place as the scheduled value and put the replica's value instead."""
        self.scheduled = self._get()
        if is_traced and not self.is_static:
            self.trace.append(self.scheduled)
        if self.held is not None:
            value = self.held
        elif self.is_complement:
            value = 1 - (1 - self.scheduled) * self.factor
        else:
            value = self.scheduled * self.factor
        if self._bounds is not None:
            value = min(max(value, self._bounds[0]), self._bounds[1])
        self._set(value)
        self._last_put = self._get()  # what is read back may be rounded

    def take_trace(self, *, keep_newest: bool) -> list[float]:
        """See :meth:`_Slot.take_trace`; a static value stands for all steps."""
        return [self.scheduled] if self.is_static else super().take_trace(keep_newest=keep_newest)

    def put_scheduled_into(self, optimizer_state: dict[str, Any]) -> None:
        """See :meth:`FloatSlot.put_scheduled_into`."""
        if self._save is not None:
            self._save(optimizer_state, self.scheduled)


Slot = FloatSlot | TensorSlot | FunctionSlot


class SlotWriter:
    """Slots that are written together.

    This is the only part of the library that runs for every group at every step. Its loops over float
    slots are written out, because a method call per slot would cost as much as the schedule itself.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._floats = [slot for slot in slots if isinstance(slot, FloatSlot)]
        self._others = [slot for slot in slots if not isinstance(slot, FloatSlot)]

    def follow(
        self,
        step_schedule: Callable[[], None],
        *,
        compare_tensors: bool,
        is_traced: bool,
        is_closed_form: bool,
    ) -> bool:
        """Let the schedule set its next values, then put the replica's in their place.

        Args:
            step_schedule: lets the schedule write its next values.
            compare_tensors: compare those too with what was put there, which waits for the device.
            is_traced: keep the scheduled values for the record.
            is_closed_form: the schedule never reads the current value, so it need not be put back first.

        Returns:
            Whether somebody else had written to a slot.
        """
        changed_outside = not is_closed_form and self.put_scheduled(compare_tensors=compare_tensors)
        step_schedule()
        self.put_values(is_traced=is_traced)
        return changed_outside

    def put_scheduled(self, *, compare_tensors: bool = False) -> bool:
        """Put every scheduled value in place; tell whether somebody else had written to a slot.

        What somebody else wrote stays, as the scheduled value. Comparing tensors waits for the device.
        """
        changed_outside = False
        for slot in self._floats:
            group, key = slot.group, slot.key
            if group[key] == slot.last_put:
                group[key] = slot.scheduled
            else:
                changed_outside = True
        for slot in self._others:
            changed_outside |= slot.put_scheduled(compare=compare_tensors or isinstance(slot, FunctionSlot))
        return changed_outside

    def put_values(self, *, is_traced: bool = False) -> None:
        """Take what is in place as scheduled values and put this replica's values instead."""
        for slot in self._floats:
            group, key, held = slot.group, slot.key, slot.held
            slot.scheduled = scheduled = group[key]
            group[key] = slot.last_put = scheduled * slot.factor if held is None else held
        for slot in self._others:
            slot.put_value(is_traced=is_traced)
        if is_traced:
            for slot in self._floats:
                slot.trace.append(slot.scheduled)

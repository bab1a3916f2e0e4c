"""Fields: the places where a hyperparameter's value lives.

A field keeps the *plan* (what the wrapped schedule last wrote) apart from what it puts in its place, so
that a schedule which computes its next value from the current one never sees a replica's multiplier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Field", "FloatField", "Panel", "TensorField", "group_field"]


class FloatField:
    """A float in a parameter group."""

    def __init__(self, optimizer: Optimizer, group_index: int, key: str) -> None:
        self._optimizer, self._index, self.key = optimizer, group_index, key
        self.factor = 1.0
        self.held: float | None = None
        self.trace: list[float] = []
        self.bind()

    def bind(self) -> None:
        """Find the place again (loading an optimizer replaces its groups); what it holds is the plan."""
        self.group = self._optimizer.param_groups[self._index]
        self.planned = self.last_put = self.group[self.key]

    def set(self, *, factor: float, held: float | None) -> None:
        """What to put from now on: the plan times ``factor``, or ``held`` whatever the plan."""
        self.factor, self.held = factor, held

    def take_trace(self, *, keep_newest: bool) -> list[float]:
        """The plans since the last call."""
        taken, self.trace = _split(self.trace, keep_newest)
        return taken

    def put_plan_into(self, state_dict: dict[str, Any]) -> None:
        """Put the plan where a saved optimizer holds this field."""
        state_dict["param_groups"][self._index][self.key] = self.planned


class TensorField:
    """A zero-dimensional tensor in a parameter group, written in place and without a host sync.

    Compiled and graph-captured optimizers read the tensor itself: replacing it would have no effect.
    """

    def __init__(self, optimizer: Optimizer, group_index: int, key: str) -> None:
        self._optimizer, self._index, self.key = optimizer, group_index, key
        self.factor = 1.0
        self.held: float | None = None
        self.trace: list[Tensor] = []
        self.bind()

    @property
    def planned(self) -> float:
        """The plan; reading it waits for the device."""
        return self._plan.item()

    @planned.setter
    def planned(self, value: float) -> None:
        self._plan.fill_(value)

    def bind(self) -> None:
        """See :meth:`FloatField.bind`."""
        self._tensor: Tensor = self._optimizer.param_groups[self._index][self.key]
        self._plan = self._tensor.detach().clone()

    def set(self, *, factor: float, held: float | None) -> None:
        """See :meth:`FloatField.set`."""
        self.factor, self.held = factor, held

    def put_plan(self) -> None:
        """Put the plan in place."""
        self._tensor.copy_(self._plan)

    def put_value(self, is_traced: bool) -> None:
        """Take what is in place as the plan and put the value instead."""
        self._plan.copy_(self._tensor)
        if is_traced:
            self.trace.append(self._plan.clone())
        if self.held is None:
            self._tensor.mul_(self.factor)
        else:
            self._tensor.fill_(self.held)

    def take_trace(self, *, keep_newest: bool) -> list[float]:
        """See :meth:`FloatField.take_trace`."""
        taken, self.trace = _split(self.trace, keep_newest)
        return torch.stack(taken).tolist() if taken else []

    def put_plan_into(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`FloatField.put_plan_into`."""
        state_dict["param_groups"][self._index][self.key] = self._plan.clone()


Field = FloatField | TensorField

_T = TypeVar("_T")


def _split(trace: list[_T], keep_newest: bool) -> tuple[list[_T], list[_T]]:
    return (trace[:-1], trace[-1:]) if keep_newest else (trace, [])


def group_field(optimizer: Optimizer, group_index: int, key: str) -> Field:
    """The field of the right kind for what the parameter group holds."""
    value = optimizer.param_groups[group_index][key]
    return (TensorField if isinstance(value, Tensor) else FloatField)(optimizer, group_index, key)


class Panel:
    """All fields of an ensemble, written together at every step.

    This is the only part of the library that runs for every group at every step. Its loops over float
    fields are written out, because a method call per field would cost as much as the schedule itself.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        self._floats = [field for field in fields if isinstance(field, FloatField)]
        self._tensors = [field for field in fields if isinstance(field, TensorField)]

    def put_plans(self) -> bool:
        """Put every plan in place; tell whether somebody else had written to a field.

        What somebody else wrote stays: it is the plan from now on.
        """
        changed_outside = False
        for field in self._floats:
            group, key = field.group, field.key
            if group[key] == field.last_put:
                group[key] = field.planned
            else:
                changed_outside = True
        for field in self._tensors:  # comparing these would wait for the device
            field.put_plan()
        return changed_outside

    def put_values(self, *, is_traced: bool = False) -> None:
        """Take what is in place as the plan and put this replica's values instead."""
        for field in self._floats:
            group, key, held = field.group, field.key, field.held
            field.planned = planned = group[key]
            group[key] = field.last_put = planned * field.factor if held is None else held
        for field in self._tensors:
            field.put_value(is_traced)
        if is_traced:
            for field in self._floats:
                field.trace.append(field.planned)

"""Dials: one scalar that replicas turn differently, and that the controller moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from torch.optim import Optimizer

from hdet.core.assign import permutation
from hdet.core.controller import ControllerState
from hdet.hyperparameters.fields import Field

__all__ = ["Dial", "Hyperparameter"]


class Hyperparameter(Protocol):
    """What a user asks to explore: it knows how to turn itself into dials."""

    @property
    def spread(self) -> float:
        """Half-width of the multipliers; zero explores nothing."""
        ...

    def dials(self, optimizer: Optimizer, num_replicas: int) -> list[Dial]:
        """The dials of this hyperparameter, one for each value that is explored on its own."""
        ...


class Dial:
    """One explored scalar: its fields, its multipliers, and what the controller has learned of it.

    The base is plan x correction, or a held base once a controller of the paper's form has taken over.
    Several fields on one dial share its multiplier and move in proportion.
    """

    def __init__(
        self, name: str, fields: Sequence[Field], multipliers: Sequence[float], floor: float | None = None
    ) -> None:
        self.name = name
        self.fields = list(fields)
        self.multipliers = list(multipliers)
        self.floor = floor
        self.multiplier = 1.0
        self.correction = 1.0
        self.held: list[float] | None = None
        self.control: ControllerState | None = None
        self.decay = 0.0

    @property
    def base(self) -> float:
        """The shared value of the first field, on the host."""
        return self.fields[0].planned * self.correction if self.held is None else self.held[0]

    def assigned(self, seed: int, round_index: int) -> list[float]:
        """The multiplier of every replica in a round (eq. 9)."""
        order = permutation(len(self.multipliers), seed, round_index, self.name)
        return [self.multipliers[i] for i in order]

    def set_fields(self, multiplier: float) -> None:
        """Tell the fields what to put from now on."""
        factor = self.correction * multiplier
        for i, field in enumerate(self.fields):
            field.set(factor=factor, held=None if self.held is None else self.held[i] * multiplier)

    def hold(self, state: ControllerState) -> None:
        """Leave the plan and keep the controller's base until it moves again (paper form)."""
        # Fields keep their proportions; a single field takes the new base to the bit.
        old = [field.planned for field in self.fields] if self.held is None else self.held
        self.held = [state.base] + [state.base * (value / old[0]) for value in old[1:]]
        self.control = state

    def correct(self, state: ControllerState) -> None:
        """Let the plan go on, multiplied by the controller's correction (log form)."""
        self.correction = math.exp(state.base)
        self.control = state

    def take_trace(self, *, keep_newest: bool) -> list[float]:
        """The base of every step since the last call; a single entry where it did not move."""
        plans = self.fields[0].take_trace(keep_newest=keep_newest)
        bases = [planned * self.correction for planned in plans] if self.held is None else [self.held[0]]
        return bases[:1] if len(set(bases)) == 1 else bases

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: numbers only, the same on every replica."""
        return {
            "planned": [field.planned for field in self.fields],
            "held": None if self.held is None else list(self.held),
            "correction": self.correction,
            "control": None if self.control is None else list(self.control),
            "decay": self.decay,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint's state."""
        for field, planned in zip(self.fields, state["planned"], strict=True):
            field.planned = planned
        self.held = None if state["held"] is None else list(state["held"])
        self.correction = state["correction"]
        self.control = None if state["control"] is None else ControllerState(*state["control"])
        self.decay = state["decay"]

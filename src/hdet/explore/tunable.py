"""Tunable: one scalar that replicas hold at different values, and that a controller moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hdet.explore.slots import Slot
from hdet.method.controller import ControllerState
from hdet.method.fan_out import factor_limits, multiplier_at, usable_share


@dataclass(eq=False)
class Tunable:
    """One explored scalar: its slots, its spread, and what the controller has learned of it.

    The base is the scheduled value times a correction. A controller of the paper's form holds a base of its
    own instead. Several slots of one tunable share its multiplier and move in proportion. Where the slots
    are complements (a momentum), all of this applies to one minus the value.
    """

    name: str
    """Of the hyperparameter, unique in an ensemble."""
    slots: Sequence[Slot]
    """Where the value lives."""
    spread: float
    """Half-width of the multipliers."""
    scale: str = "linear"
    """``"linear"`` or ``"log"`` spacing of the multipliers."""
    bounds: tuple[float, float] | None = None
    """Every replica's value stays between them."""
    floor: float | None = None
    """Where ``decay="floor"`` takes the base."""
    changes_loss: bool = False
    """Tells whether losses of replicas with different values cannot be compared."""
    is_scheduled: bool = False
    """Tells whether a schedule moves the value, so that where it stands now says little."""

    def __post_init__(self) -> None:
        self.changes_moments = self.slots[0].is_complement
        """Tells that it is a momentum: factors apply to one minus the value."""
        self.position = 0.0
        self.multiplier = 1.0
        self.correction = 1.0
        self.decay = 0.0
        self.held: list[float] | None = None
        self.control: ControllerState | None = None
        self.share = 1.0
        """The share of the spread that is used in this round, from 0 to 1."""
        self.narrow_spread()

    # --- the value -----------------------------------------------------------------------------------

    @property
    def base(self) -> float:
        """The shared value of the first slot, on the host."""
        return self._bases()[0]

    def value_with(self, multiplier: float, slot_index: int = 0) -> float:
        """Return what a replica with this multiplier uses in a slot."""
        scheduled = self.value(self.slots[slot_index].scheduled, self.correction)
        base = scheduled if self.held is None else self.held[slot_index]
        return self._bounded(self.value(base, multiplier))

    def value(self, base: float, factor: float) -> float:
        """``base`` times ``factor``, on the scale of the tunable."""
        return 1 - (1 - base) * factor if self.changes_moments else base * factor

    def narrow_spread(self) -> None:
        """At the start of a round: use as much of the spread as fits the bounds around the base."""
        if self.bounds is not None or not self.is_scheduled:
            low, high = self._inner_bounds()
            # A slot at zero stays there under any factor: it does not narrow the others.
            inner = [x for x in map(self.inner, self._bases()) if x > 0]
            shares = [usable_share(x, low, high, self.spread, self.scale) for x in inner]
            self.share = min(shares, default=0.0)

    def multipliers(self, positions: Sequence[float]) -> list[float]:
        """The replicas' factors at these positions."""
        return [multiplier_at(self.share * x, self.spread, self.scale) for x in positions]

    @property
    def half_width(self) -> float:
        """The widest multiplier of this round, as a logarithm."""
        return max(abs(math.log(m)) for m in self.multipliers((-1.0, 1.0)))

    def set_slots(self, multiplier: float) -> None:
        """Tell the slots what to hold when values are written next."""
        for i, slot in enumerate(self.slots):
            slot.factor = self.correction * multiplier
            slot.held = None if self.held is None else self.value(self.held[i], multiplier)

    # --- the controller ------------------------------------------------------------------------------

    def hold(self, state: ControllerState) -> None:
        """Leave the schedule and keep the controller's base until it moves again (paper form)."""
        base = self.move_to(self.inner(state.base))
        self.control = ControllerState(self.inner(base), state.velocity)

    def move_to(self, base: float) -> float:
        """Leave the schedule for this base; return what the bounds allow of it."""
        old = self._bases()
        before = self.inner(old[0])
        if before <= 0:  # nothing to scale: it stays
            self.held = old
            return old[0]
        factor = self.inner(base) / before
        allowed = self._allowed(factor, old)
        # Slots keep their proportions. A single slot takes the new base exactly.
        first = base if allowed == factor else self.value(old[0], allowed)
        self.held = [first] + [self.value(value, allowed) for value in old[1:]]
        return first

    def correct(self, state: ControllerState) -> None:
        """Let the schedule go on, multiplied by the controller's correction (log form)."""
        correction = math.exp(state.base)
        if self.bounds is not None:
            # Measured from where the base is: a schedule that has left the bounds by itself is not pulled
            # back, it is only not pushed further out.
            factor = correction / self.correction
            allowed = self._allowed(factor, [self.value(s.scheduled, self.correction) for s in self.slots])
            if allowed != factor:
                correction = self.correction * allowed
                state = ControllerState(math.log(correction), state.velocity)
        if correction != self.correction:
            # Scheduled values that wait to be recorded were used with the old correction.
            for slot in self.slots:
                slot.scale_trace(self.correction / correction)
        self.correction = correction
        self.control = state

    # --- records and checkpoints ---------------------------------------------------------------------

    def take_trace(self, *, keep_newest: bool) -> dict[str, list[float]]:
        """The base of every step since the last call; a single entry where it did not move.

        Under the name of the tunable, and for further slots of an optimizer under ``name[i]``.
        """
        traces: dict[str, list[float]] = {}
        for i, slot in enumerate(self.slots):
            scheduled = slot.take_trace(keep_newest=keep_newest)
            if i == 0 or not slot.is_static:
                bases = [self._bounded(self.value(p, self.correction)) for p in scheduled]
                bases = bases if self.held is None else [self.held[i]]
                name = self.name if i == 0 else f"{self.name}[{i}]"
                traces[name] = bases[:1] if len(set(bases)) == 1 else bases
        return traces

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: numbers only, the same on every replica."""
        return {
            "scheduled": [slot.scheduled for slot in self.slots],
            "held": None if self.held is None else list(self.held),
            "correction": self.correction,
            "control": None if self.control is None else list(self.control),
            "decay": self.decay,
            "share": self.share,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load a checkpoint's state."""
        for slot, scheduled in zip(self.slots, state["scheduled"], strict=True):
            slot.scheduled = scheduled
        self.held = None if state["held"] is None else list(state["held"])
        self.correction = state["correction"]
        self.control = None if state["control"] is None else ControllerState(*state["control"])
        self.decay = state["decay"]
        self.share = state["share"]

    # --- on the scale of the tunable --------------------------------------------------------------------

    def _bases(self) -> list[float]:
        if self.held is not None:
            return self.held
        return [self._bounded(self.value(slot.scheduled, self.correction)) for slot in self.slots]

    def inner(self, value: float) -> float:
        """The value as factors see it: itself, or one minus it. Its own inverse."""
        return 1 - value if self.changes_moments else value

    def _bounded(self, value: float) -> float:
        return value if self.bounds is None else min(max(value, self.bounds[0]), self.bounds[1])

    def _inner_bounds(self) -> tuple[float, float]:
        low, high = self.bounds or (0.0, math.inf)
        return (1 - high, 1 - low) if self.changes_moments else (low, high)

    def _allowed(self, factor: float, bases: Sequence[float]) -> float:
        """The factor, limited so that every slot stays well inside the bounds."""
        if self.bounds is None:
            return factor
        bounds = self._inner_bounds()
        inner = [x for x in map(self.inner, bases) if x > 0]
        limits = [factor_limits(x, *bounds, self.spread, self.scale) for x in inner]
        # A base that starts beyond the limits may stay, but not move further out.
        lowest = min(1.0, max((low for low, _ in limits), default=1.0))
        highest = max(1.0, min((high for _, high in limits), default=1.0))
        return min(max(factor, lowest), highest)

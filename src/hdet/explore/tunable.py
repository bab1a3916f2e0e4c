"""Tunable: one scalar that replicas hold at different values, and that controllers move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hdet.explore.slots import Slot
from hdet.method.fan_out import factor_limits, multiplier_at, usable_share


@dataclass(eq=False)
class Tunable:
    """One explored scalar: its slots, its spread, and what controllers have made of it.

    The base is the scheduled value times a correction, the product of the factors of all controllers. Each
    writes its own factor and reads no other's. A controller of the paper's form holds a value of its own in
    the place of the scheduled one. Several slots of one tunable share its multiplier and move in proportion.
    Where the slots are complements (a momentum), all of this applies to one minus the value.
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
    """Where ``end="floor"`` takes the base."""
    changes_loss: bool = False
    """Tells whether losses of replicas with different values cannot be compared."""
    is_scheduled: bool = False
    """Tells whether a schedule moves the value, so that where it stands now says little."""
    steered_by: str = ""
    """Name of the only controller that moves it; empty for those that move all that is explored."""

    def __post_init__(self) -> None:
        self.changes_moments = self.slots[0].is_complement
        """Tells that it is a momentum: factors apply to one minus the value."""
        self.places: list[float] = []
        """Where each replica stands in the spread in this round, from -1 to 1."""
        self.each_multiplier: list[float] = []
        """The replicas' factors on the base of this round."""
        self.position = 0.0
        self.multiplier = 1.0
        self.used_multiplier = 1.0
        """The slots of this process hold this one between steps."""
        self.forget()
        self.share = 1.0
        """The share of the spread that is used in this round, from 0 to 1."""
        self.narrow_spread()

    def forget(self) -> None:
        """Begin without anything of any controller."""
        self.factors: dict[str, float] = {}
        """Of each controller that has moved the base, by its name."""
        self.correction = 1.0
        """Their product."""
        self.held: list[float] | None = None
        """What stands in the place of the scheduled values, for each slot."""

    # --- the value -----------------------------------------------------------------------------------

    @property
    def base(self) -> float:
        """The shared value of the first slot, on the host."""
        return self._bases()[0]

    def value_with(self, multiplier: float, slot_index: int = 0) -> float:
        """Return what a replica with this multiplier uses in a slot."""
        if self.held is not None:
            return self._bounded(self.value(self.held[slot_index], self.correction * multiplier))
        base = self.value(self.slots[slot_index].scheduled, self.correction)
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

    def fan_out(self, places: list[float], index: int) -> None:
        """Begin a round: the replicas stand at these places, and this process has the one of this index."""
        self.places, self.each_multiplier = places, self.multipliers(places)
        self.position, self.multiplier = places[index], self.each_multiplier[index]

    def multipliers(self, positions: Sequence[float]) -> list[float]:
        """The replicas' factors at these positions."""
        return [multiplier_at(self.share * x, self.spread, self.scale) for x in positions]

    @property
    def half_width(self) -> float:
        """The widest multiplier of this round, as a logarithm."""
        return max(abs(math.log(m)) for m in self.multipliers((-1.0, 1.0)))

    def set_slots(self, multiplier: float | None = None) -> None:
        """Tell the slots what to hold when values are written next; None for this process's multiplier."""
        multiplier = self.used_multiplier if multiplier is None else multiplier
        for i, slot in enumerate(self.slots):
            slot.factor = self.correction * multiplier
            slot.held = None if self.held is None else self.value(self.held[i], slot.factor)

    # --- controllers ---------------------------------------------------------------------------------

    @property
    def planned(self) -> float:
        """The value of the first slot, as factors see it, without those of the controllers."""
        return self.inner(self._planned()[0])

    def hold(self, value: float) -> float:
        """Leave the schedule for this value, until it is moved again. Return what the bounds allow of it."""
        old = self._planned()
        before = self.inner(old[0])
        if before <= 0:  # nothing to scale: it stays
            self.held = old
            return old[0]
        factor = self.inner(value) / before
        allowed = factor if self.bounds is None else self._allowed(factor, self._bases())
        # Slots keep their proportions. A single slot takes the new value exactly.
        first = value if allowed == factor else self.value(old[0], allowed)
        self.held = [first] + [self.value(one, allowed) for one in old[1:]]
        return first

    def set_factor(self, controller: str, factor: float) -> float:
        """Let a controller multiply the base by this. Return what the bounds allow of it."""
        before, others = self.correction, self._product(controller)
        if self.bounds is not None:
            # Measured from where the base is: a schedule that has left the bounds by itself is not pulled
            # back, it is only not pushed further out.
            ratio = others * factor / before
            allowed = self._allowed(ratio, [self.value(planned, before) for planned in self._planned_as_is()])
            if allowed != ratio:
                factor = before * allowed / others
        self.factors[controller] = factor
        self.correction = self._product()
        if self.correction != before:
            # Scheduled values that wait to be recorded were used with the old correction.
            for slot in self.slots:
                slot.scale_trace(before / self.correction)
        return factor

    def _product(self, without: str = "") -> float:
        # In one order, so that a run that was resumed multiplies alike.
        kept = [self.factors[name] for name in sorted(self.factors) if name != without]
        return math.prod(kept, start=1.0)

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
                bases = bases if self.held is None else [self._bases()[i]]
                name = self.name if i == 0 else f"{self.name}[{i}]"
                traces[name] = bases[:1] if len(set(bases)) == 1 else bases
        return traces

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: numbers only, the same on every replica."""
        return {
            "scheduled": [slot.scheduled for slot in self.slots],
            "held": None if self.held is None else list(self.held),
            "factors": list(map(list, self.factors.items())),
            "share": self.share,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load a checkpoint's state."""
        for slot, scheduled in zip(self.slots, state["scheduled"], strict=True):
            slot.scheduled = scheduled
        self.held = None if state["held"] is None else list(state["held"])
        self.factors = dict(state["factors"])
        self.correction = self._product()
        self.share = state["share"]

    # --- on the scale of the tunable --------------------------------------------------------------------

    def _bases(self) -> list[float]:
        if self.held is not None and self.correction == 1:
            return self.held
        return [self._bounded(self.value(planned, self.correction)) for planned in self._planned_as_is()]

    def _planned(self) -> list[float]:
        as_is = self._planned_as_is()
        return as_is if self.bounds is None else list(map(self._bounded, as_is))

    def _planned_as_is(self) -> list[float]:
        return [slot.scheduled for slot in self.slots] if self.held is None else self.held

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
        bounds = self._inner_bounds()
        inner = [x for x in map(self.inner, bases) if x > 0]
        limits = [factor_limits(x, *bounds, self.spread, self.scale) for x in inner]
        # A base that starts beyond the limits may stay, but not move further out.
        lowest = min(1.0, max((low for low, _ in limits), default=1.0))
        highest = max(1.0, min((high for _, high in limits), default=1.0))
        return min(max(factor, lowest), highest)

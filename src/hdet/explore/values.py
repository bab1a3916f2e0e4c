"""ExploredValues: everything that is explored, and the one way in which it is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from hdet.checks import is_list, require_kind
from hdet.explore.hyperparameters import Hyperparameter, LearningRate, OptimizerField
from hdet.explore.slots import SlotWriter
from hdet.explore.tunable import Tunable
from hdet.weak_hook import WeakHook


def hyperparameters_of(explore: Any, *, may_be_empty: bool = False) -> list[Hyperparameter]:
    """Return what the user asked for, as a list. Raises if it is something else.

    >>> hyperparameters_of("lr")
    Traceback (most recent call last):
    TypeError: explore must be a list of hyperparameters, got 'lr' of type str: write [hdet.LearningRate()]
    """
    require_kind("explore must be a list of hyperparameters", explore, is_list(explore), _remedy(explore))
    if not (len(explore) or may_be_empty):
        raise ValueError(
            "explore must name at least one hyperparameter, got none: leave it out for the default"
        )
    for h in explore:
        is_one = callable(getattr(h, "tunables", None)) and not isinstance(h, type)
        require_kind("explore must hold hyperparameters", h, is_one, _remedy(h))
    return list(explore)


def _remedy(given: Any) -> str:
    """Tell what to write in place of a name, of a class, or of one without a list."""
    kind = given if isinstance(given, type) else type(given)
    kinds = {k.name: k for k in OptimizerField.__subclasses__()}
    kind = kinds.get(given, kind) if isinstance(given, str) else kind
    if not hasattr(kind, "tunables"):
        kind = LearningRate
    return f"write [hdet.{kind.__name__}({'' if issubclass(kind, OptimizerField) else '...'})]"


class ExploredValues:
    """The tunables of an ensemble, and what this process's optimizer and model hold of them.

    Between steps the slots hold values. While they are rewritten they hold what the schedule has set, so that
    a schedule which computes its next value from the current one never sees a multiplier.

    Args:
        explore: what the user asked for.
        optimizer: whose parameter groups hold most of it.
    """

    def __init__(self, explore: Sequence[Hyperparameter], optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.tunables: list[Tunable] = [tunable for h in explore for tunable in h.tunables(optimizer)]
        names = [tunable.name for tunable in self.tunables]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"explore must name each hyperparameter once, got {doubled} more than once")
        self.learning_rates = [tunable for tunable in self.tunables if tunable.is_scheduled]
        self.explores = any(tunable.spread > 0 for tunable in self.tunables)
        """Tells whether replicas differ at all."""
        self.static_names = [t.name for t in self.tunables if any(slot.is_static for slot in t.slots)]
        """Names of what is read by the model itself, or elsewhere outside the optimizer."""
        self.slots = [slot for tunable in self.tunables for slot in tunable.slots]
        self.every_slot = SlotWriter(self.slots)
        """Writes all of them, at syncs."""
        self.moving_slots = SlotWriter([slot for slot in self.slots if not slot.is_static])
        """Writes those that the schedule may move, at every step."""
        self._num_blocks_at_base = 0

    @property
    def base(self) -> dict[str, float]:
        """The shared value of everything that is explored."""
        return {tunable.name: tunable.base for tunable in self.tunables}

    def rates_of(self, of_groups: Sequence[float]) -> list[list[float]]:
        """Sort numbers, one for each parameter group, by learning rate and slot."""
        return [[of_groups[slot.group_index] for slot in tunable.slots] for tunable in self.learning_rates]

    # --- writing -------------------------------------------------------------------------------------

    @contextmanager
    def rewriting(self, *, is_traced: bool = False) -> Iterator[None]:
        """Within the block the slots hold scheduled values; after it, what the tunables were told."""
        self.every_slot.put_scheduled()
        try:
            yield
        finally:
            self.every_slot.put_values(is_traced=is_traced)

    def refresh(self) -> None:
        """Tell the slots what follows from corrections that have moved."""
        for tunable in self.tunables:
            tunable.set_slots()

    @contextmanager
    def at_base(self) -> Iterator[None]:
        """Within the block the slots hold the shared values. Blocks may be nested."""
        self._num_blocks_at_base += 1
        with self.rewriting():
            for tunable in self.tunables:
                tunable.set_slots(1.0)
        try:
            yield
        finally:
            self._num_blocks_at_base -= 1
            if self._num_blocks_at_base == 0:
                with self.rewriting():
                    self.refresh()

    # --- for replicas that live in one process --------------------------------------------------------

    def in_group(
        self, group_index: int, multipliers: Mapping[str, Sequence[float]]
    ) -> dict[str, list[float]]:
        """The values of a parameter group's explored fields, for each of these multipliers."""
        return {
            slot.column: [tunable.value_with(rho, i) for rho in multipliers[tunable.name]]
            for tunable in self.tunables
            for i, slot in enumerate(tunable.slots)
            if not slot.is_static and slot.group_index == group_index
        }

    def use_static(self, multipliers: Mapping[str, float]) -> None:
        """Write these multiples where the model reads them; the rest stays."""
        if self.static_names:
            with self.rewriting():
                for tunable in self.tunables:
                    if tunable.name in self.static_names:
                        tunable.set_slots(multipliers[tunable.name])

    # --- the optimizer's own checkpoint ---------------------------------------------------------------

    def watch(self, optimizer: Optimizer) -> list[Any]:
        """Keep the optimizer's checkpoints free of multipliers; returns the handles that end it."""
        return [
            optimizer.register_state_dict_post_hook(WeakHook(self._optimizer_saved)),
            optimizer.register_load_state_dict_post_hook(WeakHook(self._optimizer_loaded)),
        ]

    def _optimizer_saved(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        # A saved optimizer holds scheduled values, not one replica's: the same file from every replica.
        for slot in self.slots:
            slot.put_scheduled_into(state_dict)

    def _optimizer_loaded(self, _: Optimizer) -> None:
        # Loading replaces the parameter groups: find the slots again and put this replica's values.
        for slot in self.slots:
            slot.bind()
        self.every_slot.put_values()

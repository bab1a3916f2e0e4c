"""Any scalar that can be read and written through functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.optim import Optimizer

from hdet.checks import require_flag
from hdet.explore.hyperparameter import Spreading, read_number
from hdet.explore.slots import FunctionSlot
from hdet.explore.tunable import Tunable


@dataclass(frozen=True, eq=False)
class _Named:
    # Fields of a first base come first, so that the name can be given first.
    name: str
    get: Callable[[], float] = field(repr=False)
    set: Callable[[float], None] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Scalar(Spreading, _Named):
    """Explore anything: a name, a function that reads it, one that writes it.

    A focal loss whose gamma is a plain attribute, scored on a probe because gamma changes the loss::

        hdet.Scalar("focal_gamma", get=lambda: criterion.gamma,
                    set=lambda gamma: setattr(criterion, "gamma", gamma),
                    spread=0.5, bounds=(0, 5), changes_loss=True)
    """

    changes_loss: bool = False
    """Whether losses of replicas with different values cannot be compared: then a probe is needed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name must be a text that is not empty, got {self.name!r}")
        for what in ("get", "set"):
            if not callable(getattr(self, what)):
                raise TypeError(f"{what} must be callable, got {getattr(self, what)!r}")
        require_flag("changes_loss", self.changes_loss)

    def tunables(self, optimizer: Optimizer) -> list[Tunable]:
        """One tunable."""
        read_number(self.name, self.get())
        return self._tunable(self.name, [FunctionSlot(self.get, self.set)], changes_loss=self.changes_loss)

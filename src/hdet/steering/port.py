"""The port of a controller at work: what an ensemble tells it, what it may move, and what it remembers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hdet.checks import check_keys
from hdet.errors import WarnOnce, bad_argument
from hdet.explore import ExploredValues, Hyperparameter, Tunable
from hdet.records import RoundRecord
from hdet.replicas import Replicas


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Holds what every controller works with."""

    values: ExploredValues
    """Each tunable takes the controllers' factors."""
    replicas: Replicas
    """They are compared and scored, and their weights go back."""
    warn: WarnOnce
    """Tells the user, once."""
    sync_every: int
    total_steps: int | None


class Steering:
    """A controller at work. An ensemble has any number of them, and calls these methods.

    It has a factor of its own on every tunable, a part of the saved state, and a section of the record, all
    under its name. It reads nothing of other controllers. What it cannot work without stands in
    :mod:`hdet.steering.needs`.

    Args:
        settings: what the user gave.
        around: what it works with.
    """

    name: ClassVar[str]
    """Names it in states and records."""
    kind: ClassVar[type]
    """Of its settings."""
    explores: ClassVar[Sequence[Hyperparameter]] = ()
    """What it moves that the user need not name."""
    compares: ClassVar[bool] = False
    """It compares replicas by where they stand in the spreads, so that the record must tell it."""
    watches_steps: ClassVar[bool] = False
    """It is told of every loss and of every step, for rounds of its own."""

    def __init__(self, settings: Any, around: Surroundings) -> None:
        self.settings = settings
        self.around = around
        self.values, self.replicas, self.warn = around.values, around.replicas, around.warn

    @property
    def notes(self) -> list[str]:
        """Tell in words what a summary of the values leaves out."""
        return []

    def try_out(self) -> None:
        """Do once, before anything changes, what could fail late in the run."""

    def begin(self, num_steps: int) -> None:
        """Begin, or begin again, with the weights that replicas have now.

        Args:
            num_steps: optimizer steps so far.
        """

    def add_loss(self, loss: Any) -> None:
        """Take the loss of a batch."""

    def step_made(self, num_steps: int, record: RoundRecord | None) -> None:
        """Called after every optimizer step, with the record where it was a sync. Collective."""

    def sync(self, record: RoundRecord) -> bool | None:
        """Decide at a sync, after replicas were measured and averaged. True if earlier weights came back."""

    def went_back(self) -> None:
        """Take note that another controller has put earlier weights back at this sync."""

    @property
    def is_changed_by_saves(self) -> bool:
        """Tell whether :meth:`before_save` would now change the last digits of what it has averaged."""
        return False

    def before_save(self) -> None:
        """Gather what each replica holds a part of. Collective."""

    def after_save(self) -> None:
        """Give back what :meth:`before_save` has gathered. Called before the next step."""

    @property
    def is_in_parts(self) -> bool:
        """Tell whether a checkpoint now would lack something, because :meth:`before_save` was not called."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the CPU and numbers, the same on every replica after converging."""
        return {}

    def check_state(self, name: str, state: Any) -> None:
        """Raise if :meth:`load_state_dict` could not load this; ``name`` begins the error."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint. It is called after :meth:`begin`."""

    def warn_of_no_loss(self, consequence: str) -> None:
        """Tell that no loss has come, and what follows."""
        self.warn(
            f"no loss for {self.name}",
            f"no loss was given to step(), so {consequence}",
            remedy="call step(loss), or observe(loss) for each micro-batch",
        )

    def move(self, tunables: Sequence[Tunable], factor: float) -> None:
        """Multiply the base of these by a factor of its own."""
        for tunable in tunables:
            tunable.set_factor(self.name, factor)
        self.values.refresh()


class Controllers:
    """All controllers of an ensemble at work, none, one or several of them.

    Args:
        each: in the order in which they decide.
    """

    def __init__(self, each: Sequence[Steering]) -> None:
        self.each = each
        """In the order in which they decide."""
        self.watching = [one for one in each if one.watches_steps]
        """Those that are told of every loss and of every step."""

    def __iter__(self) -> Iterator[Steering]:
        return iter(self.each)

    def __len__(self) -> int:
        return len(self.each)

    @property
    def notes(self) -> list[str]:
        """Tell what each has to tell."""
        return [note for one in self.each for note in one.notes]

    def begin(self, num_steps: int) -> None:
        """Begin, or begin again."""
        for one in self.each:
            one.begin(num_steps)

    def before_save(self) -> None:
        """Let each gather what replicas hold in parts. Collective."""
        for one in self.each:
            one.before_save()

    def after_save(self) -> None:
        """Let each give back what it has gathered."""
        for one in self.each:
            one.after_save()

    def state_dict(self) -> dict[str, Any]:
        """Save what each remembers, by its name."""
        return {one.name: one.state_dict() for one in self.each}

    def check_state(self, state: Any) -> None:
        """Raise if one could not load its part. One that was not there before begins anew."""
        check_keys("state_dict controllers", state, ())
        here = {one.name: one for one in self.each}
        if unknown := sorted(set(state) - set(here)):
            must = f"must be of a run with the controllers {sorted(here)}"
            remedy = "build the ensemble with the controllers that it was saved with"
            raise bad_argument("state_dict", must, f"one that has {unknown}, too", remedy)
        for name, part in state.items():
            here[name].check_state(f"state_dict {name}", part)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint."""
        for one in self.each:
            if one.name in state:
                one.load_state_dict(state[one.name])

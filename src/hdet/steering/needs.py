"""Needs: which controllers there are, what each cannot work without, and which do not go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hdet.checks import is_list, require_kind
from hdet.errors import bad_argument
from hdet.explore import ExploredValues
from hdet.method.controller import Controller
from hdet.method.guard import Guard
from hdet.method.merges import MeanMerge, Merge
from hdet.method.thermostat import LEAST_STEPS, NUM_ROUNDS, Thermostat
from hdet.method.weight_decay import HeldOutWeightDecay
from hdet.steering.comparing import ComparingSteering
from hdet.steering.guard import GuardSteering
from hdet.steering.port import Steering
from hdet.steering.thermostat import ThermostatSteering
from hdet.steering.weight_decay import WeightDecaySteering

AnyController = Controller | Guard | Thermostat | HeldOutWeightDecay
"""Settings of a controller, as users give them."""
STEERINGS: Sequence[type[Steering]] = (
    GuardSteering,
    ComparingSteering,
    WeightDecaySteering,
    ThermostatSteering,
)
"""They are at work in this order: where the guard goes back, the others are told."""


def comparing(controllers: Sequence[AnyController]) -> Controller | None:
    """Give the one that compares replicas, if there is one."""
    return next((one for one in controllers if isinstance(one, Controller)), None)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Holds what a run offers to controllers."""

    total_steps: int | None
    sync_every: int
    gradients: str
    has_probe: bool
    merge: Merge = field(default_factory=MeanMerge)
    explores: bool = False
    """Replicas differ in something."""
    has_learning_rate: bool = True
    """One is explored, if only with spread 0."""
    differs_in_decay: bool = False
    """Replicas are asked to differ in the weight decay."""

    @property
    def longest_round(self) -> int:
        """Count the steps between syncs that a thermostat can wait."""
        return max(LEAST_STEPS, (self.total_steps or 0) // NUM_ROUNDS)


class Need(NamedTuple):
    """One thing that a controller cannot work without."""

    argument: str
    """Gives it."""
    is_met: Callable[[Facts], bool]
    must: str
    """The rule, in words; ``{most}`` is the longest round."""
    got: Callable[[Facts], str]
    remedy: str

    def error(self, facts: Facts) -> ValueError | TypeError:
        """Build what is raised where it is not met."""
        must = self.must.format(most=facts.longest_round)
        return bad_argument(self.argument, must, self.got(facts), self.remedy)


def _length(must: str) -> Need:
    return Need(
        "total_steps",
        lambda facts: facts.total_steps is not None,
        must,
        lambda _: "None",
        "it needs the length of the run",
    )


def _learning_rate(must: str) -> Need:
    remedy = "add hdet.LearningRate(spread=0)"
    return Need("explore", lambda facts: facts.has_learning_rate, must, lambda _: "none", remedy)


def _probe(must: str, why: str) -> Need:
    return Need(
        "probe",
        lambda facts: facts.has_probe,
        must,
        lambda _: "None",
        f"{why}. Pass probe=hdet.Probe(batches, loss)",
    )


NEEDS: dict[type, tuple[Need, ...]] = {
    Controller: (),
    Guard: (
        _length("must be given for a Guard"),
        _learning_rate("must hold an hdet.LearningRate for a Guard to lower"),
        Need(
            "merge",
            lambda facts: not (facts.merge.copies or facts.merge.stays_apart),
            "must remember nothing and leave replicas equal beside a Guard",
            lambda facts: repr(facts.merge),
            "the Guard would put weights back, but not what the merge rule remembers. Leave the Guard out, "
            "or use another rule",
        ),
    ),
    Thermostat: (
        _length("must be given for a Thermostat"),
        Need(
            "gradients",
            lambda facts: facts.gradients == "shared",
            "must be 'shared' for a Thermostat",
            lambda facts: repr(facts.gradients),
            "what averaging gains was measured where replicas train with their mean gradient. Leave "
            "gradients out, or the Thermostat",
        ),
        Need(
            "sync_every",
            lambda facts: not facts.explores or facts.sync_every <= facts.longest_round,
            "must be at most {most} for a Thermostat where replicas differ, a fortieth of total_steps",
            lambda facts: str(facts.sync_every),
            "its rounds end at syncs. Sync more often, or leave it out",
        ),
        _learning_rate("must hold an hdet.LearningRate for a Thermostat to move"),
        _probe("must be an hdet.Probe for a Thermostat", "it tells what averaging gains"),
    ),
    HeldOutWeightDecay: (
        _length("must be given for a HeldOutWeightDecay"),
        Need(
            "explore",
            lambda facts: not facts.differs_in_decay,
            "must not hold an hdet.WeightDecay beside a HeldOutWeightDecay",
            lambda _: "one",
            "held-out data moves the weight decay of equal replicas. Leave one of both out",
        ),
        _probe(
            "must be an hdet.Probe for a HeldOutWeightDecay",
            "only held-out data can tell whether more of it helps, and how surely",
        ),
        Need(
            "merge",
            lambda facts: not facts.merge.stays_apart,
            "must leave replicas equal to steer the weight decay",
            lambda facts: repr(facts.merge),
            "leave merge out",
        ),
    ),
}
"""By kind of settings. Those of a comparing controller depend on what is explored: it checks them itself."""


def unmet(controller: AnyController, facts: Facts) -> Iterator[Need]:
    """List what a controller lacks here.

    >>> facts = Facts(total_steps=None, sync_every=10, gradients="shared", has_probe=False)
    >>> [need.argument for need in unmet(Thermostat(), facts)]
    ['total_steps', 'probe']
    """
    return (need for need in NEEDS[type(controller)] if not need.is_met(facts))


def require_needs(controllers: Sequence[AnyController], facts: Facts) -> None:
    """Raise for the first thing that one of the controllers lacks."""
    for controller in controllers:
        for need in unmet(controller, facts):
            raise need.error(facts)


def controllers_of(controllers: Any) -> tuple[AnyController, ...]:
    """Return what the user gave, as a tuple. Raises if it is no list of controllers of different kinds.

    >>> controllers_of(Guard())
    Traceback (most recent call last):
    TypeError: controllers must be a list of controllers, got a value of type Guard: write [hdet.Guard()]
    """
    remedy = _remedy(controllers)
    require_kind("controllers must be a list of controllers", controllers, is_list(controllers), remedy)
    for controller in controllers:
        is_one = isinstance(controller, AnyController)
        require_kind("controllers must hold controllers", controller, is_one, _remedy(controller))
    kinds = [type(controller) for controller in controllers]
    if doubled := [f"hdet.{kind.__name__}" for kind in NEEDS if kinds.count(kind) > 1]:
        got, remedy = f"two of {doubled[0]}", "they would move the same things, leave one out"
        raise bad_argument("controllers", "must name each kind once", got, remedy)
    return tuple(controllers)


def _remedy(given: Any) -> str:
    """Tell what to write in place of a class, of a controller without a list, or of anything else."""
    kind = given if isinstance(given, type) else type(given)
    if kind in NEEDS:
        return f"write [hdet.{kind.__name__}()]"
    return "write [" + ", ".join(f"hdet.{one.__name__}()" for one in NEEDS) + "], or some of them"


def require_apart(controllers: Sequence[AnyController], values: ExploredValues) -> None:
    """Raise if two controllers would move the same hyperparameter. A guard goes with all: it only brakes."""
    kinds = {type(controller): controller for controller in controllers}
    comparing = kinds.get(Controller)
    if not isinstance(comparing, Controller) or Thermostat not in kinds:
        return  # what held-out data moves is moved by nothing else
    both = [t.name for t in values.learning_rates if comparing.form == "paper" or t.spread > 0]
    if both:
        must = "must not hold both an hdet.Controller and an hdet.Thermostat here"
        remedy = "leave one out, or give the learning rate no spread: hdet.LearningRate(spread=0)"
        remedy += " and form='log'" if comparing.form == "paper" else ""
        raise bad_argument("controllers", must, f"{both} to be moved by both", remedy)

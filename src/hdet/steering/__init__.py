"""Steering: controllers at work. What decides is in ``hdet.method``, under the same name."""

from collections.abc import Sequence

from hdet.explore import Hyperparameter
from hdet.steering.needs import STEERINGS, AnyController, require_apart
from hdet.steering.port import Controllers, Steering, Surroundings

__all__ = ["STEERINGS", "Controllers", "Steering", "Surroundings", "at_work", "explored_by"]


def explored_by(chosen: Sequence[AnyController]) -> list[Hyperparameter]:
    """List what these controllers move that the user need not name."""
    return [one for kind, _ in _kinds_of(chosen) for one in kind.explores]


def at_work(chosen: Sequence[AnyController], around: Surroundings) -> Controllers:
    """Put these controllers to work. Raise if two of them would move the same hyperparameter."""
    require_apart(chosen, around.values)
    return Controllers([kind(settings, around) for kind, settings in _kinds_of(chosen)])


def _kinds_of(chosen: Sequence[AnyController]) -> list[tuple[type[Steering], AnyController]]:
    return [(kind, settings) for kind in STEERINGS for settings in chosen if type(settings) is kind.kind]

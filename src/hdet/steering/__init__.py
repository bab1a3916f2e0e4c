"""Steering: controllers at work. What decides is in ``hdet.method``, under the same name."""

from hdet.steering.comparing import ComparingSteering
from hdet.steering.guard import GuardSteering
from hdet.steering.port import Controllers, Steering, Surroundings
from hdet.steering.thermostat import ThermostatSteering
from hdet.steering.weight_decay import WeightDecaySteering

STEERINGS: tuple[type[Steering], ...] = (
    GuardSteering,
    ComparingSteering,
    WeightDecaySteering,
    ThermostatSteering,
)
"""Those that there are, in the order in which they decide: where the guard goes back, the others are told."""

__all__ = ["STEERINGS", "Controllers", "Steering", "Surroundings"]

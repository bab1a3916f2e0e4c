"""Everything that can differ between replicas: where a value lives, how it is spread, and how it is written.

The members that live in models are in ``module_attributes``, imported when used.
"""

from hdet.explore.hyperparameters import Beta2, Epsilon, Hyperparameter, LearningRate, Momentum, WeightDecay
from hdet.explore.tunable import Tunable
from hdet.explore.values import ExploredValues

__all__ = [
    "Beta2",
    "Epsilon",
    "ExploredValues",
    "Hyperparameter",
    "LearningRate",
    "Momentum",
    "Tunable",
    "WeightDecay",
]

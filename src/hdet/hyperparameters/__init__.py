"""What can differ between replicas: where a value lives, and how it is spread."""

from hdet.hyperparameters.dial import Dial, Hyperparameter
from hdet.hyperparameters.fields import Panel
from hdet.hyperparameters.modules import (
    AttentionScale,
    AttentionTemperature,
    Dropout,
    LabelSmoothing,
    ModuleAttribute,
)
from hdet.hyperparameters.optimizer import Beta2, Epsilon, LearningRate, Momentum, WeightDecay
from hdet.hyperparameters.scalar import Scalar

__all__ = [
    "AttentionScale",
    "AttentionTemperature",
    "Beta2",
    "Dial",
    "Dropout",
    "Epsilon",
    "Hyperparameter",
    "LabelSmoothing",
    "LearningRate",
    "ModuleAttribute",
    "Momentum",
    "Panel",
    "Scalar",
    "WeightDecay",
]

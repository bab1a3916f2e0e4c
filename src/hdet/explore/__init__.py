"""What can differ between replicas: where a value lives, and how it is spread.

The members that live in models and elsewhere are in ``modules`` and ``scalar``, imported when used.
"""

from hdet.explore.optimizer_fields import Beta2, Epsilon, LearningRate, Momentum, WeightDecay
from hdet.explore.slots import Panel
from hdet.explore.tunable import Dial, Hyperparameter

__all__ = ["Beta2", "Dial", "Epsilon", "Hyperparameter", "LearningRate", "Momentum", "Panel", "WeightDecay"]

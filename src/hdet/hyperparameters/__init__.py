"""What can differ between replicas: where a value lives, and how it is spread.

The members that live in models and elsewhere are in ``modules`` and ``scalar``, imported when used.
"""

from hdet.hyperparameters.dial import Dial, Hyperparameter
from hdet.hyperparameters.fields import Panel
from hdet.hyperparameters.optimizer import Beta2, Epsilon, LearningRate, Momentum, WeightDecay

__all__ = ["Beta2", "Dial", "Epsilon", "Hyperparameter", "LearningRate", "Momentum", "Panel", "WeightDecay"]

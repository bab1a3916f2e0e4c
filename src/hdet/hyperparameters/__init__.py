"""What can differ between replicas: where a value lives, and how it is spread."""

from hdet.hyperparameters.dial import Dial, Hyperparameter
from hdet.hyperparameters.fields import Panel
from hdet.hyperparameters.learning_rate import LearningRate

__all__ = ["Dial", "Hyperparameter", "LearningRate", "Panel"]

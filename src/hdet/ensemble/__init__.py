"""The engine: joins replicas, hyperparameters and the controller into one training run."""

from hdet.ensemble.engine import Ensemble
from hdet.ensemble.warm_start import warm_start

__all__ = ["Ensemble", "warm_start"]

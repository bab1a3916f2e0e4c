"""Hyperparameter-divergent ensemble training for PyTorch: replicas that find the learning rate."""

from hdet.core.controller import Controller
from hdet.ensemble import Ensemble, warm_start
from hdet.errors import (
    AllReplicasFailedError,
    ConfigurationMismatchError,
    HdetError,
    HdetWarning,
    IdenticalLossWarning,
    NotConvergedWarning,
)
from hdet.hyperparameters import LearningRate
from hdet.replicas import finite_mean_hook
from hdet.schedules import OneCycleAutoLR, ReplayLR, export_schedule
from hdet.telemetry import JsonlSink, Records, RoundRecord, read_records

__version__ = "0.1.0"

__all__ = [
    "AllReplicasFailedError",
    "ConfigurationMismatchError",
    "Controller",
    "Ensemble",
    "HdetError",
    "HdetWarning",
    "IdenticalLossWarning",
    "JsonlSink",
    "LearningRate",
    "NotConvergedWarning",
    "OneCycleAutoLR",
    "Records",
    "ReplayLR",
    "RoundRecord",
    "__version__",
    "export_schedule",
    "finite_mean_hook",
    "read_records",
    "warm_start",
]

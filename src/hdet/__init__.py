"""Hyperparameter-divergent ensemble training for PyTorch: replicas that find the learning rate."""

from typing import TYPE_CHECKING, Any

from hdet.core.controller import Controller
from hdet.ensemble import Ensemble, warm_start
from hdet.errors import (
    AllReplicasFailedError,
    ConfigurationMismatchError,
    HdetError,
    HdetWarning,
    IdenticalLossWarning,
    NoEffectWarning,
    NotConvergedWarning,
)
from hdet.hyperparameters import (
    AttentionScale,
    AttentionTemperature,
    Beta2,
    Dropout,
    Epsilon,
    LabelSmoothing,
    LearningRate,
    ModuleAttribute,
    Momentum,
    Scalar,
    WeightDecay,
)
from hdet.replicas import finite_mean_hook
from hdet.schedules import OneCycleAutoLR, ReplayLR, export_schedule
from hdet.telemetry import JsonlSink, Records, RoundRecord, read_records

if TYPE_CHECKING:
    from hdet.virtual import VirtualEnsemble

__version__ = "0.1.0"

__all__ = [
    "AllReplicasFailedError",
    "AttentionScale",
    "AttentionTemperature",
    "Beta2",
    "ConfigurationMismatchError",
    "Controller",
    "Dropout",
    "Ensemble",
    "Epsilon",
    "HdetError",
    "HdetWarning",
    "IdenticalLossWarning",
    "JsonlSink",
    "LabelSmoothing",
    "LearningRate",
    "ModuleAttribute",
    "Momentum",
    "NoEffectWarning",
    "NotConvergedWarning",
    "OneCycleAutoLR",
    "Records",
    "ReplayLR",
    "RoundRecord",
    "Scalar",
    "VirtualEnsemble",
    "WeightDecay",
    "__version__",
    "export_schedule",
    "finite_mean_hook",
    "read_records",
    "warm_start",
]


def __getattr__(name: str) -> Any:
    # torch.func takes a while to import, and most users do not need it.
    if name == "VirtualEnsemble":
        from hdet.virtual import VirtualEnsemble

        return VirtualEnsemble
    raise AttributeError(f"module 'hdet' has no attribute {name!r}")

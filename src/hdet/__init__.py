"""Hyperparameter-divergent ensemble training for PyTorch: replicas that find the learning rate."""

import importlib
from typing import TYPE_CHECKING, Any

from hdet.core.anchored import AnchoredController
from hdet.core.controller import Controller
from hdet.core.scout import Scout
from hdet.ensemble import Ensemble
from hdet.errors import (
    AllReplicasFailedError,
    CannotVectorizeError,
    ConfigurationMismatchError,
    HdetError,
    HdetWarning,
    IdenticalLossWarning,
    NoEffectWarning,
    NotConvergedWarning,
    NotFiniteError,
    ReplicasDifferError,
)
from hdet.explore import Beta2, Epsilon, LearningRate, Momentum, WeightDecay
from hdet.replicas import finite_mean_hook, warm_start
from hdet.schedules import OneCycleAutoLR, ReplayLR, export_schedule
from hdet.telemetry import JsonlSink, Records, RoundRecord, read_records

if TYPE_CHECKING:
    from hdet.ensemble import VirtualEnsemble
    from hdet.explore.module_attributes import (
        AttentionScale,
        AttentionTemperature,
        Dropout,
        LabelSmoothing,
        ModuleAttribute,
    )
    from hdet.explore.scalar import Scalar
    from hdet.schedules.prior import Prior, prior_from
    from hdet.telemetry.trackers import MLflowSink, Tee, TensorBoardSink, WandbSink

__version__ = "0.1.0"

__all__ = [
    "AllReplicasFailedError",
    "AnchoredController",
    "AttentionScale",
    "AttentionTemperature",
    "Beta2",
    "CannotVectorizeError",
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
    "MLflowSink",
    "ModuleAttribute",
    "Momentum",
    "NoEffectWarning",
    "NotConvergedWarning",
    "NotFiniteError",
    "OneCycleAutoLR",
    "Prior",
    "Records",
    "ReplayLR",
    "ReplicasDifferError",
    "RoundRecord",
    "Scalar",
    "Scout",
    "Tee",
    "TensorBoardSink",
    "VirtualEnsemble",
    "WandbSink",
    "WeightDecay",
    "__version__",
    "export_schedule",
    "finite_mean_hook",
    "prior_from",
    "read_records",
    "warm_start",
]

# Imported when used, so that `import hdet` adds next to nothing to `import torch`.
_LAZY = {
    "AttentionScale": "hdet.explore.module_attributes",
    "AttentionTemperature": "hdet.explore.module_attributes",
    "Dropout": "hdet.explore.module_attributes",
    "LabelSmoothing": "hdet.explore.module_attributes",
    "ModuleAttribute": "hdet.explore.module_attributes",
    "MLflowSink": "hdet.telemetry.trackers",
    "Prior": "hdet.schedules.prior",
    "Scalar": "hdet.explore.scalar",
    "Tee": "hdet.telemetry.trackers",
    "TensorBoardSink": "hdet.telemetry.trackers",
    "prior_from": "hdet.schedules.prior",
    "VirtualEnsemble": "hdet.ensemble",
    "WandbSink": "hdet.telemetry.trackers",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hdet' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)

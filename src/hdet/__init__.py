"""Hyperparameter-divergent ensemble training for PyTorch: replicas that find the learning rate."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hdet import presets, testing
    from hdet.auto import AutoLR
    from hdet.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
    from hdet.core.controller import Controller
    from hdet.core.guard import Guard
    from hdet.core.merge import (
        BestMerge,
        ElasticMerge,
        GradientNormMerge,
        LateMerge,
        LossWeightedMerge,
        MeanMerge,
        OuterMerge,
    )
    from hdet.ensemble import Ensemble, VirtualEnsemble
    from hdet.errors import (
        AllReplicasFailedError,
        CannotVectorizeError,
        CheckpointError,
        ConfigurationMismatchError,
        HdetError,
        HdetWarning,
        IdenticalLossWarning,
        NoEffectWarning,
        NotConvergedWarning,
        NotFiniteError,
        ReplicaMissingError,
        ReplicasDifferError,
    )
    from hdet.explore import Beta2, Epsilon, LearningRate, Momentum, WeightDecay
    from hdet.explore.module_attributes import (
        AttentionScale,
        AttentionTemperature,
        Dropout,
        LabelSmoothing,
        ModuleAttribute,
    )
    from hdet.explore.scalar import Scalar
    from hdet.find import find_lr
    from hdet.found_lr import FoundLR
    from hdet.joint_optimizer import JointOptimizer
    from hdet.replicas import finite_mean_hook, warm_start
    from hdet.schedules import OneCycleAutoLR, ReplayLR, export_schedule
    from hdet.schedules.prior import Prior, prior_from
    from hdet.telemetry import JsonlSink, Records, RoundRecord, read_records
    from hdet.telemetry.mlflow import MLflowSink
    from hdet.telemetry.tee import Tee
    from hdet.telemetry.tensorboard import TensorBoardSink
    from hdet.telemetry.wandb import WandbSink

__version__ = "0.1.0"

__all__ = [
    "AllReplicasFailedError",
    "AttentionScale",
    "AttentionTemperature",
    "AutoLR",
    "BestMerge",
    "Beta2",
    "CannotVectorizeError",
    "Checkpoint",
    "CheckpointError",
    "ConfigurationMismatchError",
    "Controller",
    "Dropout",
    "ElasticMerge",
    "Ensemble",
    "Epsilon",
    "FoundLR",
    "GradientNormMerge",
    "Guard",
    "HdetError",
    "HdetWarning",
    "IdenticalLossWarning",
    "JointOptimizer",
    "JsonlSink",
    "LabelSmoothing",
    "LateMerge",
    "LearningRate",
    "LossWeightedMerge",
    "MLflowSink",
    "MeanMerge",
    "ModuleAttribute",
    "Momentum",
    "NoEffectWarning",
    "NotConvergedWarning",
    "NotFiniteError",
    "OneCycleAutoLR",
    "OuterMerge",
    "Prior",
    "Records",
    "ReplayLR",
    "ReplicaMissingError",
    "ReplicasDifferError",
    "RoundRecord",
    "Scalar",
    "Tee",
    "TensorBoardSink",
    "VirtualEnsemble",
    "WandbSink",
    "WeightDecay",
    "__version__",
    "export_schedule",
    "find_lr",
    "finite_mean_hook",
    "load_checkpoint",
    "presets",
    "prior_from",
    "read_records",
    "save_checkpoint",
    "testing",
    "warm_start",
]

# Each name is imported when it is first used, so that ``hdet --help`` does not wait for torch.
_MODULES = {
    "AllReplicasFailedError": "hdet.errors",
    "AttentionScale": "hdet.explore.module_attributes",
    "AttentionTemperature": "hdet.explore.module_attributes",
    "AutoLR": "hdet.auto",
    "BestMerge": "hdet.core.merge",
    "Beta2": "hdet.explore",
    "CannotVectorizeError": "hdet.errors",
    "Checkpoint": "hdet.checkpoints",
    "CheckpointError": "hdet.errors",
    "ConfigurationMismatchError": "hdet.errors",
    "Controller": "hdet.core.controller",
    "Dropout": "hdet.explore.module_attributes",
    "ElasticMerge": "hdet.core.merge",
    "Ensemble": "hdet.ensemble",
    "Epsilon": "hdet.explore",
    "FoundLR": "hdet.found_lr",
    "GradientNormMerge": "hdet.core.merge",
    "Guard": "hdet.core.guard",
    "HdetError": "hdet.errors",
    "HdetWarning": "hdet.errors",
    "IdenticalLossWarning": "hdet.errors",
    "JointOptimizer": "hdet.joint_optimizer",
    "JsonlSink": "hdet.telemetry",
    "LabelSmoothing": "hdet.explore.module_attributes",
    "LateMerge": "hdet.core.merge",
    "LearningRate": "hdet.explore",
    "LossWeightedMerge": "hdet.core.merge",
    "MLflowSink": "hdet.telemetry.mlflow",
    "MeanMerge": "hdet.core.merge",
    "ModuleAttribute": "hdet.explore.module_attributes",
    "Momentum": "hdet.explore",
    "NoEffectWarning": "hdet.errors",
    "NotConvergedWarning": "hdet.errors",
    "NotFiniteError": "hdet.errors",
    "OneCycleAutoLR": "hdet.schedules",
    "OuterMerge": "hdet.core.merge",
    "Prior": "hdet.schedules.prior",
    "Records": "hdet.telemetry",
    "ReplayLR": "hdet.schedules",
    "ReplicaMissingError": "hdet.errors",
    "ReplicasDifferError": "hdet.errors",
    "RoundRecord": "hdet.telemetry",
    "Scalar": "hdet.explore.scalar",
    "Tee": "hdet.telemetry.tee",
    "TensorBoardSink": "hdet.telemetry.tensorboard",
    "VirtualEnsemble": "hdet.ensemble",
    "WandbSink": "hdet.telemetry.wandb",
    "WeightDecay": "hdet.explore",
    "export_schedule": "hdet.schedules",
    "find_lr": "hdet.find",
    "finite_mean_hook": "hdet.replicas",
    "load_checkpoint": "hdet.checkpoints",
    "presets": "hdet",
    "prior_from": "hdet.schedules.prior",
    "read_records": "hdet.telemetry",
    "save_checkpoint": "hdet.checkpoints",
    "testing": "hdet",
    "warm_start": "hdet.replicas",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hdet' has no attribute {name!r}")
    if _MODULES[name] == "hdet":  # a module of the package itself
        return importlib.import_module(f"hdet.{name}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

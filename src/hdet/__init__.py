"""Hyperparameter-divergent ensemble training for PyTorch: replicas that find the learning rate."""

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The public names, once. Type checkers read them here, and so does __getattr__: each is imported when it is
# first used, so that ``hdet --help`` does not wait for torch.
if TYPE_CHECKING:
    from hdet import presets as presets
    from hdet.auto import AutoLR as AutoLR
    from hdet.checkpoints import Checkpoint as Checkpoint
    from hdet.checkpoints import load_checkpoint as load_checkpoint
    from hdet.checkpoints import save_checkpoint as save_checkpoint
    from hdet.ensemble import Ensemble as Ensemble
    from hdet.ensemble.virtual import VirtualEnsemble as VirtualEnsemble
    from hdet.errors import AllReplicasFailedError as AllReplicasFailedError
    from hdet.errors import CannotVectorizeError as CannotVectorizeError
    from hdet.errors import CheckpointError as CheckpointError
    from hdet.errors import ConfigurationMismatchError as ConfigurationMismatchError
    from hdet.errors import HdetError as HdetError
    from hdet.errors import HdetWarning as HdetWarning
    from hdet.errors import IdenticalLossWarning as IdenticalLossWarning
    from hdet.errors import NoEffectWarning as NoEffectWarning
    from hdet.errors import NotConvergedWarning as NotConvergedWarning
    from hdet.errors import NotFiniteError as NotFiniteError
    from hdet.errors import ReplicaMissingError as ReplicaMissingError
    from hdet.errors import ReplicasDifferError as ReplicasDifferError
    from hdet.explore import Beta2 as Beta2
    from hdet.explore import Epsilon as Epsilon
    from hdet.explore import LearningRate as LearningRate
    from hdet.explore import Momentum as Momentum
    from hdet.explore import WeightDecay as WeightDecay
    from hdet.explore.hyperparameters import Scalar as Scalar
    from hdet.explore.module_attributes import AttentionScale as AttentionScale
    from hdet.explore.module_attributes import AttentionTemperature as AttentionTemperature
    from hdet.explore.module_attributes import Dropout as Dropout
    from hdet.explore.module_attributes import LabelSmoothing as LabelSmoothing
    from hdet.explore.module_attributes import ModuleAttribute as ModuleAttribute
    from hdet.joint_optimizer import JointOptimizer as JointOptimizer
    from hdet.method.controller import Controller as Controller
    from hdet.method.guard import Guard as Guard
    from hdet.method.merges import MeanMerge as MeanMerge
    from hdet.method.merges import Merge as Merge
    from hdet.method.merges import OuterMerge as OuterMerge
    from hdet.method.thermostat import Thermostat as Thermostat
    from hdet.method.weight_decay import HeldOutWeightDecay as HeldOutWeightDecay
    from hdet.records import JsonlSink as JsonlSink
    from hdet.records import Records as Records
    from hdet.records import RoundRecord as RoundRecord
    from hdet.records import Tee as Tee
    from hdet.records import read_records as read_records
    from hdet.replicas import finite_mean_hook as finite_mean_hook
    from hdet.replicas import warm_start as warm_start
    from hdet.replicas.probe import Probe as Probe
    from hdet.schedules import OneCycleAutoLR as OneCycleAutoLR
    from hdet.schedules.replay import Prior as Prior
    from hdet.schedules.replay import ReplayLR as ReplayLR
    from hdet.schedules.replay import export_schedule as export_schedule
    from hdet.schedules.replay import prior_from as prior_from
    from hdet.search.found import FoundLR as FoundLR
    from hdet.search.with_torch import find_lr as find_lr
    from hdet.trackers import TensorBoardSink as TensorBoardSink
    from hdet.trackers import WandbSink as WandbSink
    from hdet.tuning import tune as tune

__version__ = "0.1.0"


def _public_names() -> dict[str, str]:
    """Where each public name is: the imports for type checkers above, as a table."""
    source = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    block = next(node for node in source.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


_MODULES = _public_names()
__all__ = ["__version__", *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hdet' has no attribute {name!r}")
    if _MODULES[name] == "hdet":  # a module of the package itself
        return importlib.import_module(f"hdet.{name}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

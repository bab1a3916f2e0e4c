"""The method, written once above the port: joins replicas, explored values and controllers into one run."""

from hdet.ensemble.ensemble import Ensemble
from hdet.ensemble.virtual import VirtualEnsemble

__all__ = ["Ensemble", "VirtualEnsemble"]

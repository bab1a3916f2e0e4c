"""The method, written once above the port: joins replicas, explored values and controllers into one run."""

from hdet.ensemble.ensemble import Ensemble

__all__ = ["Ensemble"]

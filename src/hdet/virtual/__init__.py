"""N replicas in one process on one device."""

from hdet.virtual.ensemble import VirtualEnsemble

__all__ = ["VirtualEnsemble"]

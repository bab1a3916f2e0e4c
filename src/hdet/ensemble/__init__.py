"""The method, written once above the port: joins replicas, explored values and controllers into one run."""

from typing import TYPE_CHECKING, Any

from hdet.ensemble.ensemble import Ensemble

if TYPE_CHECKING:
    from hdet.ensemble.virtual import VirtualEnsemble

__all__ = ["Ensemble", "VirtualEnsemble"]


def __getattr__(name: str) -> Any:
    if name != "VirtualEnsemble":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hdet.ensemble.virtual import VirtualEnsemble

    return VirtualEnsemble

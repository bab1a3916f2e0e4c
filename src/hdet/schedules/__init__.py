"""Schedulers: the drop-in one, and the replay of what a run has learned."""

from typing import TYPE_CHECKING, Any

from hdet.schedules.one_cycle import OneCycleAutoLR

if TYPE_CHECKING:
    from hdet.schedules.replay import ReplayLR, export_schedule

__all__ = ["OneCycleAutoLR", "ReplayLR", "export_schedule"]


def __getattr__(name: str) -> Any:
    if name not in ("ReplayLR", "export_schedule"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hdet.schedules import replay

    return getattr(replay, name)

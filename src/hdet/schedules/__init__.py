"""Schedulers: the drop-in one, and the replay of what a run has learned."""

from hdet.schedules.one_cycle import OneCycleAutoLR
from hdet.schedules.replay import ReplayLR, export_schedule

__all__ = ["OneCycleAutoLR", "ReplayLR", "export_schedule"]

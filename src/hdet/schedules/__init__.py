"""Schedulers: the drop-in one, and the replay of what a run has learned."""

from hdet.schedules.one_cycle import OneCycleAutoLR

__all__ = ["OneCycleAutoLR"]

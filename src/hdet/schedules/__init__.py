"""Schedulers: the drop-in one, and the replay of what a run has learned."""

from hdet.schedules.one_cycle import OneCycleAutoLR
from hdet.schedules.prior import Prior, prior_from
from hdet.schedules.replay import ReplayLR, export_schedule

__all__ = ["OneCycleAutoLR", "Prior", "ReplayLR", "export_schedule", "prior_from"]

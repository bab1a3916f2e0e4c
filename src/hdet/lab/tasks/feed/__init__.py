"""Ranking of a feed: what will a user do with each item, given what came before (the paper, section 4)."""

from hdet.lab.tasks.feed.task import Feed

__all__ = ["Feed"]

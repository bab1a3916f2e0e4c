"""Helpers are collected for doctests too: not where their framework is missing."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("lightning") else ["lightning_modules.py", "two_ranks.py"]

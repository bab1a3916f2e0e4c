"""Helpers are collected for doctests too: not where their framework is missing."""

from importlib.util import find_spec

collect_ignore = [
    "trainer_runs.py",
    "trainer_held_out.py",
    "titan_runs.py",
    "keras_run.py",
    "timm_run.py",
    "ray_local_run.py",
]
if not find_spec("lightning"):
    collect_ignore += ["lightning_modules.py", "lightning_held_out.py", "two_ranks.py"]

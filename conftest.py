"""Modules are collected for their doctests. Those that need jax are not, where it is missing."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("jax") and find_spec("optax") else ["src/hdet/jax", "research/jax_zoo"]

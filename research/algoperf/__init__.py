"""A submission to AlgoPerf's self-tuning ruleset, and what it reached. How to run it is in README.md here."""

from __future__ import annotations

__all__: list[str] = []

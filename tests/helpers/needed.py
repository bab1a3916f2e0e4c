"""needed: import a package that not every target of the Makefile installs, or skip the test."""

from __future__ import annotations

from typing import Any

import pytest

_TARGETS = {"jax": "test-jax", "ray": "test-ray"}


def needed(module: str) -> Any:
    """Import a module. Skip the test where its package is not installed, and say which target installs it."""
    package = module.partition(".")[0]
    target = _TARGETS.get(package, "test-integrations")
    return pytest.importorskip(module, reason=f"{package} is not installed; make {target} runs them")

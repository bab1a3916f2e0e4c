"""hdet.jax where jax is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest

import hdet


def test_without_jax_the_error_names_the_install_command(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("hdet.jax")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(hdet.HdetError, match=r"hdet.jax needs jax and optax: pip install .*\[jax\]"):
        importlib.import_module("hdet.jax")

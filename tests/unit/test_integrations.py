"""Integrations import without their frameworks, and then say what to install."""

from __future__ import annotations

import pytest

import hdet
import hdet.integrations.transformers as integration


def test_a_missing_framework_names_the_install_command(monkeypatch):
    monkeypatch.setattr(integration, "TrainerCallback", object)
    with pytest.raises(hdet.HdetError, match=r"pip install .*\[transformers\]'"):
        integration.HdetCallback()

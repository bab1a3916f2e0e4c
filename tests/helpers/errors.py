"""The error of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["error_of"]


def error_of(function: Callable[..., Any], *given: Any, **told: Any) -> str:
    """The message of what the call raises, which must be short."""
    with pytest.raises((TypeError, ValueError)) as caught:
        function(*given, **told)
    text = str(caught.value)
    assert len(text) < 400 and "\n" not in text
    return text

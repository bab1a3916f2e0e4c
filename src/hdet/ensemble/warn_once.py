"""WarnOnce: tell the user about something a single time, from one process."""

from __future__ import annotations

from hdet.errors import warn


class WarnOnce:
    """Warns at most once for each key.

    Args:
        is_silent: whether another process speaks for this one.
    """

    def __init__(self, *, is_silent: bool) -> None:
        self._is_silent = is_silent
        self._told: set[str] = set()

    def __call__(self, key: str, text: str, category: type[Warning]) -> None:
        """Warn, unless this was told before."""
        if key not in self._told:
            self._told.add(key)
            if not self._is_silent:
                warn(text, category)

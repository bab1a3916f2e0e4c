"""Stopwatch: what the parts of a sync cost."""

from __future__ import annotations

import time

from hdet.records import RoundRecord


class Stopwatch:
    """Times on the host, lap by lap."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self, name: str, record: RoundRecord) -> None:
        """Write the time since the last lap into the record."""
        now = time.perf_counter()
        record.milliseconds[name], self._last = 1000 * (now - self._last), now

"""ProgressLine: says on a terminal how far a search is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_PATIENCE = 5.0
"""Seconds after which people want to know."""
_LEAST_WAIT = 0.1
"""Seconds between two lines."""


class ProgressLine:
    """Writes one line, over and over, from the fifth second on. It is removed in the end.

    Args:
        is_wanted: nothing is written without it, nor where the stream is no terminal.
        stream: where to; None for stderr.
        clock: in seconds.
    """

    def __init__(
        self, is_wanted: bool, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = is_wanted and self._stream is not None and self._stream.isatty()
        self._clock = clock
        self._start = clock()
        self._due = self._start + _PATIENCE
        self._width = 0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            self._write("")

    def begin(self, what: str, num_steps: int) -> None:
        """Count the steps of the next part of the search from zero on."""
        self._what = what
        self._num_steps = num_steps
        self._num_done = 0

    def step(self, count: int = 1) -> None:
        """Count steps that are done."""
        self._num_done += count
        now = self._clock()
        if self._is_shown and now >= self._due:
            self._due = now + _LEAST_WAIT
            share = min(99, 100 * self._num_done // self._num_steps)  # some are made again
            seconds = now - self._start
            self._write(f"hdet: finding the learning rate, {self._what} {share} %, {seconds:.0f} s")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r{text:{self._width}}" if text else f"\r{'':{self._width}}\r")
        self._stream.flush()
        self._width = len(text)

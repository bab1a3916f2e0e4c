"""A Ctrl-C that saves."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["stop_on_signal"]


@contextmanager
def stop_on_signal(*, insist: bool = True) -> Iterator[Callable[[], bool]]:
    """Within the block a Ctrl-C (or SIGTERM) asks for a stop; yields a function that tells whether it came.

    Args:
        insist: a second Ctrl-C ends at once.
    """
    asked = False

    def handle(number: int, _: object) -> None:
        nonlocal asked
        if asked and insist and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

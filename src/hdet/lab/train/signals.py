"""A Ctrl-C that saves."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupted(KeyboardInterrupt):
    """A signal that ends at once.

    A class of its own: where a plain KeyboardInterrupt has passed through ``exec``, Python ends itself by the
    signal later on, whatever exit code was asked for.
    """


@contextmanager
def stop_on_signal(
    *, insist: bool = True, ends_at_once: Callable[[], bool] = lambda: False
) -> Iterator[Callable[[], bool]]:
    """Within the block a Ctrl-C (or SIGTERM) asks for a stop; yields a function that tells whether it came.

    Args:
        insist: a second Ctrl-C ends at once.
        ends_at_once: asked when a signal comes; whether there is nothing to save, so that it ends at once.
    """
    asked = False

    def handle(number: int, _: object) -> None:
        nonlocal asked
        is_repeated, asked = asked, True
        if (is_repeated and insist and number == signal.SIGINT) or ends_at_once():
            raise Interrupted

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

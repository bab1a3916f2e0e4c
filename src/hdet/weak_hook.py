"""Letting go: hooks that keep nothing alive, and objects that close."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


def weak_hook(method: Callable[..., None]) -> Callable[..., None]:
    """Call a bound method for as long as somebody else holds its object; afterwards do nothing.

    A strong reference would close a circle: optimizer, hook, what hdet knows of it, optimizer. Then model,
    optimizer and process group would outlive their last user until the garbage collector runs. There a gloo
    group may block for its whole time limit, or for good.

    >>> class Counter:
    ...     num_calls = 0
    ...     def count(self):
    ...         self.num_calls += 1
    >>> counter = Counter()
    >>> hook = weak_hook(counter.count)
    >>> hook(); counter.num_calls
    1
    >>> del counter
    >>> hook()
    """
    known = weakref.WeakMethod(method)

    def hook(*arguments: Any) -> None:
        alive = known()
        if alive is not None:
            alive(*arguments)

    return hook


class Closing:
    """Closes at the end of a ``with`` block."""

    def close(self) -> None:
        """Let go of everything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

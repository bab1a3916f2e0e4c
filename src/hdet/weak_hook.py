"""Letting go: hooks that keep nothing alive, and objects that close."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from typing_extensions import Self


class WeakHook:
    """Call a bound method for as long as somebody else holds its object; afterwards do nothing.

    A strong reference would close a circle: optimizer, hook, what hdet knows of it, optimizer. Then model,
    optimizer and process group would outlive their last user until the garbage collector runs. There a gloo
    group may block for its whole time limit, or for good.

    >>> class Counter:
    ...     num_calls = 0
    ...     def count(self):
    ...         self.num_calls += 1
    >>> counter = Counter()
    >>> hook = WeakHook(counter.count)
    >>> hook(); counter.num_calls
    1
    >>> del counter
    >>> hook()
    """

    def __init__(self, method: Any) -> None:
        self._known, self._function = weakref.ref(method.__self__), method.__func__

    def __call__(self, *arguments: Any) -> None:
        """Call the method, if its object is still there."""
        alive = self._known()
        if alive is not None:
            self._function(alive, *arguments)

    def __deepcopy__(self, _: Any) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "what hdet drives must not be pickled: save its state_dict(), and load that into a new one"
        )


class Closing:
    """Closes at the end of a ``with`` block."""

    def close(self) -> None:
        """Let go of everything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""Limits of settings, written as type hints and checked in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from hdet.checks import require_choice, require_count, require_flag, require_number

Positive = Annotated[float, {"above": 0}]
NotNegative = Annotated[float, {"at_least": 0}]
Share = Annotated[float, {"at_least": 0, "below": 1}]
CountFromZero = Annotated[int, {"at_least": 0}]


def require_hinted(owner: Callable[..., object], values: Mapping[str, Any]) -> None:
    """Raise unless the values are what the type hints of a dataclass or a function say.

    A plain ``int`` is a count from one on. What may be None by its hint is not checked where it is None, and
    hints of other kinds are left to their owner.

    >>> def walk(steps: int, pace: Positive = 1.0): ...
    >>> require_hinted(walk, {"steps": 3, "pace": 0})
    Traceback (most recent call last):
    ValueError: pace must be a number above 0, got 0
    """
    for name, hint in get_type_hints(owner, include_extras=True).items():
        is_optional = type(None) in get_args(hint)
        if name not in values or (is_optional and values[name] is None):
            continue
        hint = get_args(hint)[0] if is_optional else hint
        kind, limits = get_args(hint) if get_origin(hint) is Annotated else (hint, {})
        if get_origin(kind) is Literal:
            require_choice(name, values[name], get_args(kind))
        elif kind in _CHECKS:
            _CHECKS[kind](name, values[name], **limits)


_CHECKS: dict[Any, Callable[..., object]] = {bool: require_flag, int: require_count, float: require_number}

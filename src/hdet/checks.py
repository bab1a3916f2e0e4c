"""Checks of user input. Each error names the argument, the rule, the value and the remedy."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, TypeGuard

from hdet.errors import bad_argument

_LONGEST = 80
"""Characters of a value that an error shows."""
_HUGE = 10**308
"""Beyond it there are no floats."""


def require_number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
    remedy: str = "",
) -> float:
    """Return ``value`` as a float if it is a finite number inside the stated range.

    >>> require_number("spread", 0.25, at_least=0, below=1)
    0.25
    >>> require_number("spread", 1.2, at_least=0, below=1)
    Traceback (most recent call last):
    ValueError: spread must be a number in [0, 1), got 1.2
    """
    rule = _range_text(above, at_least, below, at_most)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _of_wrong_type(name, f"a number{rule}", value, remedy)
    number = float(value) if abs(value) < _HUGE else math.inf
    inside = above < number < below and at_least <= number <= at_most
    if not math.isfinite(number) or not inside:
        must = f"must be a {'finite ' if not rule else ''}number{rule}"
        raise bad_argument(name, must, repr(value), remedy)
    return number


def require_count(
    name: str, value: object, *, at_least: int = 1, at_most: int = 2**53, remedy: str = ""
) -> int:
    """Return ``value`` if it is an integer in this range.

    >>> require_count("sync_every", 0)
    Traceback (most recent call last):
    ValueError: sync_every must be an integer of at least 1, got 0
    """
    rule = f"an integer of at least {at_least}"
    if isinstance(value, bool) or not isinstance(value, int):
        is_whole = isinstance(value, float) and value.is_integer()
        write = f"write {value:.0f}" if is_whole else ""
        raise _of_wrong_type(name, rule, value, write)
    if value < at_least:
        raise bad_argument(name, f"must be {rule}", repr(value), remedy)
    if value > at_most:
        raise bad_argument(name, f"must be at most {at_most}", repr(value), remedy)
    return value


def require_path(name: str, value: object) -> Path:
    """Return ``value`` as a path.

    >>> require_path("path", 3)
    Traceback (most recent call last):
    TypeError: path must be a text or a Path, got 3 of type int
    """
    require_kind(f"{name} must be a text or a Path", value, isinstance(value, (str, Path)))
    return Path(str(value))


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Tell if this is a list or another sequence, but no text.

    >>> is_list((1, 2)), is_list("ab"), is_list(3)
    (True, False, False)
    """
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def require_kind(must: str, value: object, is_right: bool, remedy: str = "") -> None:
    """Raise unless ``value`` is of the right kind; ``must`` names the argument and the rule.

    >>> require_kind("model must be a torch.nn.Module", 3, False)
    Traceback (most recent call last):
    TypeError: model must be a torch.nn.Module, got 3 of type int
    """
    if not is_right:
        name, _, rule = must.partition(" must ")
        raise bad_argument(name, f"must {rule}", shown(value), remedy, kind=TypeError)


def shown(value: object) -> str:
    """Describe a value in an error: itself where that is short, else its type, and its shape or length.

    >>> shown(3), shown([0] * 50)
    ('3 of type int', 'a value of type list and length 50')
    """
    name, shape = type(value).__name__, getattr(value, "shape", None)
    if not isinstance(value, type) and isinstance(shape, tuple):
        return f"a value of type {name} and shape {tuple(shape)}"
    text = repr(value)
    if len(text) <= _LONGEST and "\n" not in text:
        return f"{text} of type {name}"
    return f"a value of type {name}" + (f" and length {len(value)}" if isinstance(value, Sized) else "")


def require_batches(batches: object, remedy: str, one_batch: type | tuple[type, ...] = Mapping) -> None:
    """Raise unless ``batches`` can be read batch by batch, as a DataLoader and a list can.

    Args:
        batches: what the user gave.
        remedy: what to write.
        one_batch: kinds that can be read, but are one batch.

    >>> require_batches({"x": 1}, "write [batch]")
    Traceback (most recent call last):
    TypeError: batches must be a DataLoader or a list of batches, got {'x': 1} of type dict: write [batch]
    """
    is_data_set = hasattr(batches, "__getitem__") and not isinstance(batches, Iterable)
    is_right = isinstance(batches, Iterable) and not isinstance(batches, one_batch)
    remedy = "wrap it in a DataLoader" if is_data_set else remedy
    require_kind("batches must be a DataLoader or a list of batches", batches, is_right, remedy)


def require_flag(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False.

    >>> require_flag("three_phase", "yes")
    Traceback (most recent call last):
    TypeError: three_phase must be True or False, got 'yes' of type str
    """
    if not isinstance(value, bool):
        raise _of_wrong_type(name, "True or False", value)
    return value


def require_choice(name: str, value: object, choices: Collection[str], *, also: str = "") -> str:
    """Return ``value`` if it is one of ``choices``; ``also`` names what else the argument takes.

    >>> require_choice("form", "papre", ("paper", "log"))
    Traceback (most recent call last):
    ValueError: form must be one of 'paper', 'log', got 'papre'
    """
    rule = "one of " + ", ".join(repr(choice) for choice in choices) + (f" or {also}" if also else "")
    if not isinstance(value, str):
        raise _of_wrong_type(name, rule, value)
    if value not in choices:
        raise bad_argument(name, f"must be {rule}", repr(value))
    return value


def require_number_or_choice(
    name: str, value: object, choices: Collection[str], *, above: float = -math.inf, below: float = math.inf
) -> None:
    """Raise unless ``value`` is one of ``choices`` or a finite number between ``above`` and ``below``.

    >>> require_number_or_choice("temperature", "hot", ("auto",), above=0)
    Traceback (most recent call last):
    ValueError: temperature must be one of 'auto' or a number above 0, got 'hot'
    """
    if isinstance(value, str):
        rule = _range_text(above, -math.inf, below, math.inf)
        require_choice(name, value, choices, also=f"a number{rule}")
    else:
        require_number(name, value, above=above, below=below)


def _range_text(above: float, at_least: float, below: float, at_most: float) -> str:
    low_open, low = (above >= at_least, max(above, at_least))
    high_open, high = (below <= at_most, min(below, at_most))
    if math.isinf(low) and math.isinf(high):
        return ""
    if math.isinf(high):
        return f" {'above' if low_open else 'of at least'} {low:g}"
    if math.isinf(low):
        return f" {'below' if high_open else 'of at most'} {high:g}"
    return f" in {'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"


def _of_wrong_type(name: str, rule: str, value: object, remedy: str = "") -> ValueError | TypeError:
    got = f"{value!r} of type {type(value).__name__}"
    return bad_argument(name, f"must be {rule}", got, remedy, kind=TypeError)


# --- parts of a saved state ----------------------------------------------------------------------------

SAME_SETTINGS = "build the ensemble with the parameter groups and settings that it was saved with"
"""What to do where a state does not fit."""


def check_keys(name: str, state: Any, keys: Collection[str]) -> None:
    """Raise if a part of a state lacks something.

    >>> check_keys("state_dict", {"b": 1}, ["a", "b"])
    Traceback (most recent call last):
    ValueError: state_dict must hold a, b, but it has no a: load what state_dict() of an ensemble has returned
    """
    require_kind(f"{name} must be a dictionary", state, isinstance(state, Mapping))
    if missing := [key for key in keys if key not in state]:
        raise ValueError(
            f"{name} must hold {', '.join(keys)}, but it has no {', '.join(missing)}: load what state_dict() "
            "of an ensemble has returned"
        )


def check_counts(name: str, state: Mapping[str, Any], keys: Collection[str]) -> None:
    """Raise unless these are whole numbers of at least zero."""
    for key in keys:
        require_count(f"{name} {key}", state[key], at_least=0)


def check_numbers(name: str, values: Any, count: int, *, is_finite: bool = True) -> None:
    """Raise unless this is a list of so many numbers."""
    check_list(name, values, count, "numbers")
    for value in values:
        if is_finite or not isinstance(value, float) or math.isfinite(value):
            require_number(name, value)


def named(name: str, pairs: Any) -> dict[str, Any]:
    """Return the dictionary that was saved as a list of names and values. Raise if this is none.

    A distributed checkpoint is loaded into the entries that a new run has, so that a dictionary may not grow.

    >>> named("factors", [["guard", 0.5]])
    {'guard': 0.5}
    """
    is_list = isinstance(pairs, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs
    )
    require_kind(f"{name} must be a list of names and values", pairs, is_list)
    return dict(pairs)


def check_list(name: str, values: Any, count: int, what: str) -> None:
    """Raise unless this is a list of so many things."""
    require_kind(f"{name} must be a list of {what}", values, isinstance(values, (list, tuple)))
    if len(values) != count:
        raise bad_argument(name, f"must hold {count} {what}", str(len(values)), SAME_SETTINGS)

"""Errors and warnings that a user of hdet may want to catch."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import warnings
from urllib.parse import unquote, urlsplit


def bad_argument(
    argument: str, must: str, got: str, remedy: str = "", *, kind: type[ValueError | TypeError] = ValueError
) -> ValueError | TypeError:
    """Build the error for an argument that is not right. It has the fields ``argument`` and ``remedy``.

    Args:
        argument: its name.
        must: the rule.
        got: what was given, as text.
        remedy: what to do instead.
        kind: of the error.

    >>> error = bad_argument("spread", "must be below 1", "1.2", "use scale='log'")
    >>> error
    ValueError("spread must be below 1, got 1.2: use scale='log'")
    >>> error.argument, error.remedy
    ('spread', "use scale='log'")
    """
    error = kind(f"{argument} {must}, got {got}" + (f": {remedy}" if remedy else ""))
    vars(error).update(argument=argument, remedy=remedy)
    return error


class HdetError(Exception):
    """Base of every error that hdet raises on its own account."""


class ConfigurationMismatchError(HdetError, ValueError):
    """Replicas were built with different settings, or lost step with each other."""


class NotFiniteError(HdetError, RuntimeError):
    """Parameters are not finite, so they are neither averaged nor saved."""


class AllReplicasFailedError(NotFiniteError):
    """No replica has finite parameters and a finite loss: there is nothing left to average."""


class ReplicasDifferError(HdetError, RuntimeError):
    """Replicas that ought to hold the same parameters do not."""


class ReplicaMissingError(HdetError, RuntimeError):
    """A replica did not come to a sync that the others wait for."""


class CheckpointError(HdetError, RuntimeError):
    """A checkpoint is broken, or does not fit what it is loaded into."""


class CannotVectorizeError(HdetError, RuntimeError):
    """The model or its loss does something that cannot be done for all virtual replicas at once."""


class HdetWarning(UserWarning):
    """Base of every warning that hdet emits."""

    argument = ""
    """Name of the argument that it is about, if it is about one."""
    remedy = ""
    """What to do, the last sentence of the warning; empty where it needs none."""


class IdenticalLossWarning(HdetWarning):
    """Every replica reported the same loss, so the controller has nothing to compare."""


class NoEffectWarning(HdetWarning):
    """A hyperparameter found nothing to change, or nothing that could be spread."""


class NotConvergedWarning(HdetWarning):
    """State was saved while the replicas' parameters differ."""


def warn(
    text: str, category: type[HdetWarning] = HdetWarning, *, argument: str = "", remedy: str = ""
) -> None:
    """Warn, and point at the line of the user's code that led here, however deep in hdet this is called.

    Args:
        text: says what was noticed.
        category: of the warning.
        argument: the warning's field.
        remedy: the warning's field, which is added to the text.
    """
    warning = category(f"{text}: {remedy}" if remedy else text)
    warning.argument, warning.remedy = argument, remedy
    frame, stacklevel = inspect.currentframe(), 1
    while frame is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] in _ON_THE_WAY:
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(warning, stacklevel=stacklevel)


class WarnOnce:
    """Warn at most once for each key.

    Args:
        is_silent: another process speaks for this one.
    """

    def __init__(self, *, is_silent: bool) -> None:
        self._is_silent = is_silent
        self._told: set[str] = set()

    def __call__(self, key: str, text: str, category: type[HdetWarning] = HdetWarning, **fields: str) -> None:
        """Warn, unless this was told before."""
        if key not in self._told:
            self._told.add(key)
            if not self._is_silent:
                warn(text, category, **fields)


_ON_THE_WAY = ("hdet", "contextlib", "torch")
"""Packages whose lines a warning does not point at."""


def install_command(extra: str) -> str:
    """Tell what to type for an extra of hdet: from the folder that hdet was installed from, if it was."""
    try:
        origin = importlib.metadata.distribution("hdet").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        origin = None
    source = json.loads(origin) if origin else {}
    url = urlsplit(source.get("url", ""))
    if url.scheme != "file" or "dir_info" not in source:
        return f"pip install 'hdet[{extra}]'"
    editable = "-e " if source["dir_info"].get("editable") else ""
    return f"pip install {editable}'{unquote(url.path)}[{extra}]'"

"""Tracker: a sink that shows a run to people while it goes on, and never ends a training.

A library is imported when its sink first writes, and a run is opened only then: a sink may be made on
every rank, though replica zero alone writes.
"""

from __future__ import annotations

import abc
import importlib.util
from collections.abc import Callable, Mapping
from contextlib import suppress

from hdet.errors import HdetError, HdetWarning, install_command, warn
from hdet.round_record import RoundRecord, scalars


class Tracker(abc.ABC):
    """Shows a run to people. It never ends a training.

    The first failure (a full disk, a server out of reach) is reported by one :class:`hdet.HdetWarning`; from
    then on the tracker does nothing. For one of your own, derive from it and define :meth:`log` and
    :meth:`finish`.
    """

    library: str = ""
    """What it needs, and the extra of hdet that installs it; empty for nothing."""

    def __init__(self) -> None:
        if self.library and importlib.util.find_spec(self.library) is None:
            raise HdetError(
                f"{type(self).__name__} needs {self.library}, which is not installed: "
                f"{install_command(self.library)}"
            )
        self._is_over = False

    @abc.abstractmethod
    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show these numbers at this step; it may raise."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Write what is left and let go; it may raise, and may come without a :meth:`log` before it."""

    def abandon(self) -> None:
        """Let go after a failure, without waiting for anything."""
        with suppress(Exception):
            self.finish()

    def write(self, record: RoundRecord) -> None:
        """Show a record's :func:`scalars`."""
        self._try(lambda: self.log(record.step, scalars(record)))

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the results of an evaluation, under the names that they have."""
        self._try(lambda: self.log(step, {name: float(value) for name, value in metrics.items()}))

    def close(self) -> None:
        """Write what is left. Later records are ignored."""
        self._try(self.finish)
        self._is_over = True

    def _try(self, act: Callable[[], None]) -> None:
        if self._is_over:
            return
        try:
            act()
        except Exception as error:
            self._is_over = True
            self.abandon()
            warn(
                f"{type(self).__name__} failed and is left out from here on, the training continues: "
                f"{type(error).__name__}: {error}",
                HdetWarning,
            )

"""Trackers: sinks that show a run to people while it goes on, and never end a training.

A library is imported when its sink first writes, and a run is opened only then: a sink may be made on
every rank, though replica zero alone writes.
"""

from __future__ import annotations

import abc
import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from hdet.checks import require_choice
from hdet.errors import HdetError, HdetWarning, install_command, warn
from hdet.round_record import RoundRecord, scalars


class Tracker(abc.ABC):
    """Shows a run to people. It never ends a training.

    The first failure (a full disk, a server out of reach) is reported by one :class:`hdet.HdetWarning`; from
    then on the tracker does nothing. For one of your own, derive from it and define :meth:`log` and
    :meth:`finish`.
    """

    library: str = ""
    """Name of what it needs, and of the extra of hdet that installs it; empty for nothing."""

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


class TensorBoardSink(Tracker):
    """Writes event files for TensorBoard: ``tensorboard --logdir FOLDER``.

    Needs neither torch nor TensorFlow. TensorBoard keeps single precision.

    Args:
        folder: where the event files go.
    """

    library = "tensorboard"

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._writer: Any = None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """See :class:`Tracker`; on disk when it returns."""
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(str(self.folder))
        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def finish(self) -> None:
        """See :class:`Tracker`."""
        if self._writer is not None:
            self._writer.close()


class WandbSink(Tracker):
    """Writes a run of Weights & Biases, beside any run that you have open yourself.

    Nothing leaves the machine unless you say so. Without ``mode``, the environment's ``WANDB_MODE`` counts;
    without that, the run is online if ``WANDB_API_KEY`` is set and offline otherwise. A key that
    ``wandb login`` has left in a file does not count: pass ``mode="online"``, or send an offline run later
    with ``wandb sync``.

    Steps are in the column ``step``, which is the x axis of every panel: W&B's own counter drops what comes
    after a run goes back to a checkpoint.

    Args:
        project: the project of the run.
        name: of the run; W&B invents one if None.
        mode: ``"online"``, ``"offline"``, ``"disabled"`` or ``"shared"``; see above for None.
        config: settings to show with the run.
        folder: where local files go, in a folder ``wandb``; the current one if None.
    """

    library = "wandb"

    def __init__(
        self,
        project: str = "hdet",
        *,
        name: str | None = None,
        mode: Literal["online", "offline", "disabled", "shared"] | None = None,
        config: Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        super().__init__()
        if mode is None:
            key_mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
            mode = os.environ.get("WANDB_MODE") or key_mode  # pyright: ignore[reportAssignmentType]
        self.mode = require_choice("mode", mode, ("online", "offline", "disabled", "shared"))
        self.project = project
        self.name = name
        self.config = dict(config or {})
        self.folder = None if folder is None else Path(folder)
        self._run: Any = None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """See :class:`Tracker`; W&B sends in the background."""
        if self._run is None:
            self._run = self._start()
        self._run.log({"step": step, **numbers})

    def _start(self) -> Any:
        import wandb

        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)  # W&B would fall back on a temporary one
        run = wandb.init(
            project=self.project,
            name=self.name,
            mode=self.mode,  # pyright: ignore[reportArgumentType]
            config=self.config,
            dir=self.folder,
            reinit="create_new",
            settings=wandb.Settings(console="off"),  # what the training prints is not ours to take
        )
        run.define_metric("*", step_metric="step")
        return run

    def finish(self) -> None:
        """See :class:`Tracker`."""
        if self._run is not None:
            self._run.finish()

    def abandon(self) -> None:
        """See :class:`Tracker`; W&B itself closes what is open when the process ends."""

"""TensorBoardSink: records in TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hdet.trackers.base import Tracker


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

"""Trackers: sinks that show a run to people while it goes on, and never end a training.

A library is imported when its sink first writes, and a run is opened only then: a sink may be made on
every rank, though replica zero alone writes.
"""

from __future__ import annotations

import abc
import atexit
import importlib.util
import os
import queue
import re
import threading
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


class MLflowSink(Tracker):
    """Writes a run of MLflow.

    The run goes to ``tracking_uri``, or to the SQLite file ``mlflow.db`` in ``folder``; without both, to the
    environment's ``MLFLOW_TRACKING_URI``, or else to ``mlflow.db`` in the current folder. Look at a file with
    ``mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db``.

    Requests are sent by a thread of their own: MLflow tries for many minutes to reach a server that is away,
    and the replicas would wait with it.

    Args:
        tracking_uri: a database or a server. MLflow no longer takes folders of files.
        experiment: the experiment of the run, made if there is none.
        name: of the run; MLflow invents one if None.
        config: settings, kept as parameters of the run.
        folder: where ``mlflow.db`` is.
    """

    library = "mlflow"
    close_seconds = 60.0
    """Seconds for which :meth:`close`, or else the end of the process, waits for what is on its way."""

    def __init__(
        self,
        tracking_uri: str | None = None,
        *,
        experiment: str = "hdet",
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        super().__init__()
        if tracking_uri is not None and folder is not None:
            raise ValueError(
                f"folder must be None where tracking_uri is given, got {str(folder)!r} and {tracking_uri!r}"
            )
        if folder is None:
            tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._folder = None if tracking_uri else Path(folder or ".").absolute()
        if self._folder is not None:
            tracking_uri = f"sqlite:///{(self._folder / 'mlflow.db').as_posix()}"
        assert tracking_uri is not None
        is_files = tracking_uri.startswith(("file:", "/", "."))
        if is_files and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
            raise ValueError(
                f"tracking_uri must name a database or a server, got {tracking_uri!r}: MLflow no longer "
                "writes folders of files, pass folder= for a SQLite file there"
            )
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        self.name = name
        self.config = dict(config or {})
        self._client: Any = None
        self._run_id: str | None = None
        self._thread: _Thread | None = None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """See :class:`Tracker`; raises what an earlier request failed with."""
        import mlflow.tracking  # noqa: F401  in this thread, so that a broken installation is reported at once

        if self._thread is None:
            self._thread = _Thread("hdet-mlflow", self.close_seconds)
        now = int(1000 * time.time())
        self._thread.do(lambda: self._send(step, numbers, now))

    def _send(self, step: int, numbers: Mapping[str, float], milliseconds: int) -> None:
        from mlflow.entities import Metric

        if self._run_id is None:
            self._run_id = self._start()
        metrics = [Metric(_mlflow_name(name), value, milliseconds, step) for name, value in numbers.items()]
        for i in range(0, len(metrics), 1000):  # what MLflow takes at once
            self._client.log_batch(self._run_id, metrics=metrics[i : i + 1000])

    def _start(self) -> str:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        location = None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            location = (self._folder / "mlartifacts").as_uri()
        self._client = client = MlflowClient(self.tracking_uri)
        try:
            experiment_id = client.create_experiment(self.experiment, artifact_location=location)
        except MlflowException:
            experiment = client.get_experiment_by_name(self.experiment)
            if experiment is None:
                raise  # else it is there already
            experiment_id = experiment.experiment_id
        run_id = client.create_run(experiment_id, run_name=self.name).info.run_id
        for key, value in self.config.items():
            client.log_param(run_id, _mlflow_name(key), str(value)[:6000])
        return run_id

    def finish(self) -> None:
        """See :class:`Tracker`."""
        if self._thread is not None:
            self._thread.do(lambda: self._client.set_terminated(self._run_id))
            self._thread.end()

    def abandon(self) -> None:
        """See :class:`Tracker`; what has not been sent stays unsent."""
        if self._thread is not None:
            self._thread.forget()


class _Thread(threading.Thread):
    """Does jobs one after the other, in the background, until one fails.

    The end of the process waits for it, but not for long: what it waits for itself may never come.
    """

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(name=name, daemon=True)
        self._seconds = seconds
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self.start()
        atexit.register(self._wait)

    def do(self, job: Callable[[], None]) -> None:
        """Add a job; raises what an earlier one failed with."""
        if self._error is not None:
            raise self._error
        self._jobs.put(job)

    def end(self) -> None:
        """Wait until all jobs are done; raises if one has failed or the time is over."""
        self.forget()
        self._wait()
        if self._error is not None:
            raise self._error
        if self.is_alive():
            raise TimeoutError(f"no answer within {self._seconds:g} s")

    def forget(self) -> None:
        """Let the process end without it."""
        atexit.unregister(self._wait)

    def _wait(self) -> None:
        self._jobs.put(None)
        self.join(self._seconds)

    def run(self) -> None:
        """Do the jobs; see :class:`threading.Thread`."""
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except Exception as error:
            self._error = error


def _mlflow_name(name: str) -> str:
    """Make a name that MLflow takes: it refuses most signs, and paths that are not in their simplest form.

    >>> _mlflow_name("base/smoothing [%]"), _mlflow_name("a//../b")
    ('base/smoothing ___', 'a/b')
    """
    parts = re.sub(r"[^/\w.\- ]", "_", name).split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"

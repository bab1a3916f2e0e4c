"""MLflowSink: records in MLflow, sent in the background."""

from __future__ import annotations

import atexit
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hdet.trackers.base import Tracker


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
    """How long :meth:`close`, or else the end of the process, waits for what is still on its way."""

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
        if tracking_uri is None and folder is None:
            tracking_uri = os.environ.get("MLFLOW_TRACKING_URI") or None
        self._folder: Path | None = None
        if tracking_uri is None:
            self._folder = Path(folder or ".").absolute()
            tracking_uri = f"sqlite:///{(self._folder / 'mlflow.db').as_posix()}"
        is_files = tracking_uri.startswith(("file:", "/", "."))
        if is_files and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
            raise ValueError(
                f"tracking_uri must name a database or a server, got {tracking_uri!r}: MLflow no longer "
                "writes folders of files, pass folder= for a SQLite file there"
            )
        self.tracking_uri, self.experiment, self.name = tracking_uri, experiment, name
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
        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            try:
                client.create_experiment(self.experiment, artifact_location=location)
            except MlflowException:
                if client.get_experiment_by_name(self.experiment) is None:
                    raise  # else another process was faster
            experiment = client.get_experiment_by_name(self.experiment)
            assert experiment is not None
        run_id = client.create_run(experiment.experiment_id, run_name=self.name).info.run_id
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


class _Thread:
    """Does jobs one after the other, in the background, until one fails.

    The end of the process waits for it, but not for long: what it waits for itself may never come.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self._seconds = seconds
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self._end_quietly)

    def do(self, job: Callable[[], None]) -> None:
        """Add a job; raises what an earlier one failed with."""
        if self._error is not None:
            raise self._error
        self._jobs.put(job)

    def end(self) -> None:
        """Wait until all jobs are done; raises if one has failed or the time is over."""
        self.forget()
        self._jobs.put(None)
        self._thread.join(self._seconds)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"no answer within {self._seconds:g} s")

    def forget(self) -> None:
        """Let the process end without it."""
        atexit.unregister(self._end_quietly)

    def _end_quietly(self) -> None:
        with suppress(Exception):
            self.end()

    def _run(self) -> None:
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

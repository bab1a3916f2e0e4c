"""WandbSink: records in Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hdet.checks import require_choice
from hdet.trackers.base import Tracker


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
        self.project, self.name = project, name
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

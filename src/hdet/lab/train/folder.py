"""RunFolder: the files that a run leaves, each written so that a fault loses nothing."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hdet
from hdet.checkpoints import Checkpoint, open_checkpoint
from hdet.lab.train.config import RunConfig
from hdet.records import replacing


class RunFolder:
    """The folder of one run; its attributes are the files in it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.environment = self.path / "environment.json"
        self.records = self.path / "records.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.result = self.path / "result.json"
        self.report = self.path / "report.html"

    @classmethod
    def create(cls, path: Path, config: RunConfig, extra: dict[str, Any]) -> RunFolder:
        """Make a new folder; raises if there is a run already."""
        folder = cls(path)
        folder.require_free()
        path.mkdir(parents=True, exist_ok=True)
        write_json(folder.environment, _environment())
        write_json(folder.config, config.to_json() | {"name": config.name or path.name} | extra)
        return folder

    def require_free(self) -> None:
        """Raise if there is a run already, or something that is no folder."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(
                f"out must be a folder, got {str(self.path)!r}, which is a file: give another --out"
            )
        if self.config.exists():
            raise ValueError(
                f"out must be a folder without a run, got {str(self.path)!r}: give another --out, go on with "
                f"'{self.resume_command}', or pass --overwrite"
            )

    def read_result(self) -> dict[str, Any] | None:
        """Read what the run came to; None if it has not ended."""
        try:
            return json.loads(self.result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def read_config(self) -> RunConfig:
        """Read the settings that the run was started with."""
        try:
            data = json.loads(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"{str(self.path)!r} must be the folder of a run, but it has no config.json"
            ) from None
        except ValueError as error:
            raise ValueError(f"{self.config}: cannot be read as JSON ({error})") from error
        if not isinstance(data, dict):
            raise ValueError(f"{self.config} must hold settings by name, got {type(data).__name__}")
        return RunConfig.from_json(data)

    def remove_run(self) -> None:
        """Delete what a run wrote, and nothing else."""
        for file in (*vars(self).values(), *self.checkpoints.glob("step-*.pt*")):
            if file.is_file():
                file.unlink()
        if self.checkpoints.is_dir() and not any(self.checkpoints.iterdir()):
            self.checkpoints.rmdir()

    @property
    def resume_command(self) -> str:
        """Give the command that goes on with the run."""
        return f"hdet resume {shlex.quote(str(self.path))}"

    @property
    def has_checkpoint(self) -> bool:
        """Tell whether there is one, sound or not."""
        return any(self.checkpoints.glob("step-*.pt"))

    def open_checkpoint(self) -> Checkpoint:
        """Open the newest sound checkpoint, read and checked."""
        checkpoint = open_checkpoint(self.checkpoints)
        if checkpoint is None:
            raise ValueError(
                f"{str(self.path)!r} has no checkpoint to go on from: start the run again with --overwrite"
            )
        return checkpoint


def write_json(path: Path, data: Any) -> None:
    """Replace a JSON file in one go."""
    with replacing(path) as file:
        file.write(f"{json.dumps(data, indent=1)}\n".encode())


def _environment() -> dict[str, Any]:
    return {
        "command": shlex.join(["hdet", *sys.argv[1:]]),
        "hdet": hdet.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
